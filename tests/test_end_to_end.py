# SPDX-License-Identifier: Apache-2.0
"""The whole line on real trainings: planted faults turn verdicts red; a resumed run is the straight one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SMOKE = REPOSITORY / "suites" / "smoke.yaml"
FSDP2 = "sft-tiny-llama-1n2c-fsdp2"

# Minutes on a quiet machine of two cores; the limit is for a busy one.
pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(1200)]


def lora_suite(*words: str, run_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORA_SUITE_")}
    # Drivers call the commands by name: those of the interpreter that runs the tests.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    if run_dir is not None:
        environment["LORA_SUITE_RUN_DIR"] = str(run_dir)
    command = [sys.executable, "-m", "lora_suite", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100)


def run_suite(results: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, verdict.json and output of `lora-suite run suites/smoke.yaml`, of the fsdp2 pair alone."""
    done = lora_suite("run", str(SMOKE), "-k", "fsdp2", "--results", str(results), *words)
    (verdict,) = results.glob("*/*/verdict.json")
    return done.returncode, json.loads(verdict.read_text()), done.stdout + done.stderr


def lora_run(verdict: dict[str, Any]) -> dict[str, Any]:
    return next(run for run in verdict["runs"] if run["arm"] == "lora")


def fsdp2_pair(verdict: dict[str, Any]) -> dict[str, Any]:
    return next(pair for pair in verdict["pairs"] if pair["name"] == "fsdp2")


def test_a_frozen_b_fails_an_invariant(tmp_path: Path) -> None:
    status, verdict, output = run_suite(
        tmp_path, "--repeats", "1", "--arm", "lora:debug.faults.freeze_b=true"
    )
    assert status == 1, output
    run = lora_run(verdict)
    assert run["state"] == "FAIL"
    red = {
        check["name"] for check in run["checks"] if check["state"] == "FAIL" and check["kind"] == "invariant"
    }
    # With B held at zero A never gets a gradient, so that invariant is red as well.
    assert red == {"adapters_moved", "a_gradients_step2"}
    full = next(run for run in verdict["runs"] if run["arm"] == "full")
    assert full["state"] == "PASS"


def test_a_lora_arm_far_slower_fails_the_pair(tmp_path: Path) -> None:
    # Six times as slow, of which two are asked for: a busy machine takes a part of it away.
    status, verdict, output = run_suite(
        tmp_path, "--repeats", "4", "--arm", "lora:debug.faults.slow_step=6.0"
    )
    assert status == 1, output
    assert {run["state"] for run in verdict["runs"]} == {"PASS"}
    pair = fsdp2_pair(verdict)
    assert pair["state"] == "FAIL"
    assert pair["checks"][0]["effect"]["low"] > 2.0
    assert any("slow_step" in note for note in pair["notes"])


def test_a_killed_rank_is_an_error_with_its_rank_and_step(tmp_path: Path) -> None:
    status, verdict, output = run_suite(
        tmp_path, "--repeats", "1", "--arm", "lora:debug.faults.kill_rank_at='1:5'"
    )
    assert status == 3, output
    run = lora_run(verdict)
    assert run["state"] == "ERROR"
    assert "rank 1" in run["message"]
    assert "step" in run["message"]
    # The other case still ran.
    assert next(run for run in verdict["runs"] if run["arm"] == "full")["state"] == "PASS"


def test_three_of_thirty_steps_are_incomplete(tmp_path: Path) -> None:
    status, verdict, output = run_suite(tmp_path, "--repeats", "1", "--arm", "lora:debug.faults.stop_at=3")
    assert status == 4, output
    run = lora_run(verdict)
    assert run["state"] == "MISSING"
    assert "3 of 30" in run["message"]
    assert run["steps_done"] == 3


def test_dtensor_trains_with_tensor_parallelism_and_lora(tmp_path: Path) -> None:
    recipe = REPOSITORY / "recipes" / f"{FSDP2}tp2-lora.yaml"
    done = lora_suite("train", "--config", str(recipe), run_dir=tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {invariant["name"] for invariant in record["invariants"] if not invariant["ok"]} == set()
    losses = json.loads((tmp_path / "run" / "metrics.json").read_text())["train/loss"]
    assert losses["30"] < 0.8 * losses["1"]


@pytest.mark.parametrize("stem", [f"{FSDP2}-lora", "sft-tiny-llama-1n2c-megatron-tp2-lora", FSDP2])
def test_a_resumed_run_is_the_straight_one(stem: str, tmp_path: Path) -> None:
    """Loss, gradient norm and batches of steps 5 to 8, straight and resumed at 4, bit for bit."""
    recipe = str(REPOSITORY / "recipes" / f"{stem}.yaml")
    common = ["sft.val_period=0", "checkpointing.enabled=true", "checkpointing.save_period=4"]
    common += ["checkpointing.metric_name=null", "sft.max_num_steps=8"]

    straight = lora_suite("train", "--config", recipe, *common, run_dir=tmp_path / "straight")
    assert straight.returncode == 0, straight.stdout + straight.stderr
    first = lora_suite(
        "train", "--config", recipe, *common, "debug.faults.stop_at=4", run_dir=tmp_path / "resumed"
    )
    assert first.returncode == 0, first.stdout + first.stderr
    second = lora_suite("train", "--config", recipe, *common, run_dir=tmp_path / "resumed")
    assert second.returncode == 0, second.stdout + second.stderr

    whole, joined = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("straight", "resumed")
    )
    for metric in ("train/loss", "train/grad_norm", "train/lr", "train/global_valid_toks"):
        assert joined[metric] == whole[metric]
        assert set(joined[metric]) == {str(step) for step in range(1, 9)}
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("straight", "resumed")]
    assert records[0]["batches"] == records[1]["batches"]
    assert records[1]["segments"] == [1, 5]
