# SPDX-License-Identifier: Apache-2.0
"""The shipped example: a trainer that shares no code with ours, beside our own, on real trainings."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "suites" / "external_example.yaml"

EXIT = {"FAIL": 1, "INCONCLUSIVE": 5, "PASS": 0}
"""What a suite ends with, the worst first."""

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


def test_plain_peft_beside_ours_is_judged_by_what_it_took(tmp_path: Path) -> None:
    """Whether both take the same time is asked of a quiet machine (`make soak`), not of this one."""
    status, verdict, output = run_example(tmp_path, "--repeats", "3")
    runs = {run["arm"]: run for run in verdict["runs"]}
    assert {run["state"] for run in verdict["runs"]} == {"PASS"}, output
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

    check, tail = pair["checks"]
    assert (check["operator"], check["limit"]) == ("<", 1.7)
    if check["effect"] is not None:
        assert check["effect"]["ratios"] == pytest.approx(ratios(verdict, check), rel=1e-9)
    assert check["state"] == state_of(check)
    # A tail that only may be too long is none.
    assert tail["state"] == (
        "PASS" if state_of(tail) == "INCONCLUSIVE" and tail["effect"] else state_of(tail)
    )
    worst = next(each for each in EXIT if each in (check["state"], tail["state"]))
    assert (pair["state"], status) == (worst, EXIT[worst])


def test_plain_peft_far_slower_does_not_pass(tmp_path: Path) -> None:
    """Six times as slow, where 1.7 is the limit: more than a busy machine makes of one arm or the other."""
    status, verdict, output = run_example(tmp_path, "--repeats", "3", "--arm", "external:--slow=6")
    assert {run["state"] for run in verdict["runs"]} == {"PASS"}, output
    (pair,) = verdict["pairs"]
    check = pair["checks"][0]
    assert check["state"] == state_of(check) != "PASS"
    assert (pair["state"], status) in (("FAIL", 1), ("INCONCLUSIVE", 5))
    assert min(ratios(verdict, check)) > 1.7


def ratios(verdict: dict[str, Any], check: dict[str, Any]) -> list[float]:
    """The external arm's step as a multiple of ours, of each repeat: the median over the steps that count."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for run in verdict["runs"]:
        series = json.loads((Path(run["directory"]) / "metrics.json").read_text())
        times[run["arm"], run["repeat"]] = series["timing/train/step_time"]
    found = []
    for matched in check["matched"]:
        repeat, counted = matched["repeat"], set(matched["steps"]) - set(matched["trimmed"])
        external, native = times["external", repeat], times["native", repeat]
        found.append(statistics.median(external[str(step)] / native[str(step)] for step in counted))
    return found


def state_of(check: dict[str, Any]) -> str:
    """What `ratio < limit` comes to, by its interval; there is none of times that were not steady."""
    if check["effect"] is None:
        assert "steady" in check["message"]
        return "INCONCLUSIVE"
    low, high = check["effect"]["low"], check["effect"]["high"]
    if high < check["limit"]:
        return "PASS"
    return "FAIL" if low >= check["limit"] else "INCONCLUSIVE"
