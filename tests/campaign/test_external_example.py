# SPDX-License-Identifier: Apache-2.0
"""The shipped example: a trainer that shares no code with ours, beside our own, on real trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "suites" / "external_example.yaml"

pytestmark = [pytest.mark.train, pytest.mark.slow]


def run_example(results: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, verdict.json and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORA_SUITE_")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    # Both arms get one thread, so that the ratio says nothing of how they share the cores.
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "lora_suite", "run", str(EXAMPLE), "--results", str(results), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    (verdict,) = results.glob("*/*/verdict.json")
    return done.returncode, json.loads(verdict.read_text()), done.stdout + done.stderr


def test_plain_peft_beside_ours_passes(tmp_path: Path) -> None:
    status, verdict, output = run_example(tmp_path)
    assert status == 0, output
    runs = {run["arm"]: run for run in verdict["runs"]}
    assert runs["external"]["not_judged"] == ["LoRA invariants (not measured in an external run)"]
    (pair,) = verdict["pairs"]
    assert any("weak evidence" in note for note in pair["notes"])
    folders = {arm: Path(run["directory"]) for arm, run in runs.items()}
    records = {arm: json.loads((folder / "run.json").read_text()) for arm, folder in folders.items()}
    metrics = {arm: json.loads((folder / "metrics.json").read_text()) for arm, folder in folders.items()}
    # The same batches by count, and the same task: the losses end near one another.
    tokens = "train/global_valid_toks"
    assert metrics["external"][tokens] == metrics["native"][tokens]
    assert records["external"]["batches"]["1"] == f"tokens:{metrics['native'][tokens]['1']:g}"
    assert abs(metrics["external"]["train/loss"]["30"] - metrics["native"]["train/loss"]["30"]) < 0.3
    assert (folders["external"] / "outputs" / "out" / "metrics.json").is_file()
    assert not (EXAMPLE.parent / "external" / "out").exists()


def test_plain_peft_three_times_as_slow_fails_the_pair(tmp_path: Path) -> None:
    status, verdict, output = run_example(tmp_path, "--arm", "external:--slow=3")
    assert status == 1, output
    assert {run["state"] for run in verdict["runs"]} == {"PASS"}
    (pair,) = verdict["pairs"]
    assert pair["state"] == "FAIL"
    assert pair["checks"][0]["effect"]["low"] > 1.7
