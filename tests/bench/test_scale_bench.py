# SPDX-License-Identifier: Apache-2.0
"""What the suite itself costs where there is much: 500 cases of 50 steps, and a folder of 10,000 runs.

The trainings are stand-ins that copy a file, so nearly all that is measured is the suite's own: its planning,
its lint, its drivers with their checks, its judging, its reports. It is processor time, whatever else runs.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lora_suite.campaign.selftest.runs import healthy, make_case
from lora_suite.judge.verdict import RunVerdict, SuiteVerdict

ROOT = Path(__file__).resolve().parents[2]
BASE = "sft-tiny-llama-1n2c-fsdp2"
STEPS = 50
CASES = 500
RUNS = 10_000
LIMIT_SECONDS_A_CASE = 0.5
LIMIT_MIB = 300.0
LIMIT_START_SECONDS = 3.0
# A table of 10,000 lines.
LIMIT_TABLE_SECONDS = 10.0

# In place of the trainer: the same metrics every time, and a record that is this run's.
STAND_IN = """
lora-suite() {
  cp "$stand_in/metrics.json" "$LORA_SUITE_RUN_DIR/metrics.json"
  sed "s/RUN_ID/$LORA_SUITE_RUN_ID/; s/CASE/$LORA_SUITE_CASE/" \\
    "$stand_in/run.json" > "$LORA_SUITE_RUN_DIR/run.json"
}
"""

# Runs the command in a process that then tells the peak of its own memory, without what it was forked from.
COMMAND = """
import re, sys
from pathlib import Path
from lora_suite.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
peak = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())
print("peak KiB", peak[1], file=sys.stderr)
sys.exit(code)
"""


def project(folder: Path, cases: int) -> Path:
    """Write a suite of so many cases, each with a recipe and a driver of its own; returns its file."""
    for name in ("recipes", "scripts", "suites", "stand_in"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "common.sh", folder / "scripts")
    for name in ("models", "data", "templates"):
        shutil.copytree(ROOT / "recipes" / name, folder / "recipes" / name)
    for name in ("sft.yaml", f"{BASE}.yaml"):
        shutil.copy(ROOT / "recipes" / name, folder / "recipes")
    metrics, record = healthy(make_case(BASE), 1, steps=STEPS)
    recipe = {**record["recipe"], "sft": {**record["recipe"]["sft"], "max_num_steps": STEPS}}
    record |= {"run_id": "RUN_ID", "case": "CASE", "ended": None, "recipe": recipe}
    (folder / "stand_in" / "metrics.json").write_text(json.dumps(metrics))
    (folder / "stand_in" / "run.json").write_text(json.dumps(record))
    stems = [f"{BASE}-n{number}" for number in range(cases)]
    for stem in stems:
        (folder / "recipes" / f"{stem}.yaml").write_text(
            f"defaults: {BASE}.yaml\nsft: {{max_num_steps: {STEPS}}}\n"
        )
        (folder / "scripts" / f"{stem}.sh").write_text(
            "#!/usr/bin/env bash\n"
            'source "$(dirname "${BASH_SOURCE[0]}")/common.sh"\n'
            f"stand_in={folder}/stand_in{STAND_IN}"
            f"declare_case steps={STEPS} minutes=3\n"
            'train "$@"\n'
            f'check \'data["train/loss"]["{STEPS}"] < 2.8\'\n'
        )
    suite = folder / "suites" / "many.yaml"
    suite.write_text("name: Many\ncases:\n" + "".join(f"  - {stem}\n" for stem in stems))
    return suite


@dataclass(frozen=True)
class Cost:
    """Processor seconds of a command and all that it started; MiB of its own memory at most."""

    seconds: float
    mib: float
    done: subprocess.CompletedProcess[str]


def cost_of(*arguments: str, cwd: Path) -> Cost:
    """Run `lora-suite` with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, int(done.stderr.split("peak KiB")[-1]) / 1024, done)


def many_cases(folder: Path, cases: int) -> tuple[Cost, Cost]:
    """The cost of a suite of so many cases, run eight at once, and of planning it alone."""
    suite = project(folder, cases)
    planned = cost_of("run", str(suite), "--plan", cwd=folder)
    assert planned.done.returncode == 0, planned.done.stdout + planned.done.stderr
    ran = cost_of("run", str(suite), "--slots", "8", cwd=folder)
    assert ran.done.returncode == 0, ran.done.stdout[-3000:] + ran.done.stderr[-3000:]
    (stored,) = (folder / "results" / "many").glob("*/verdict.json")
    verdict = SuiteVerdict.model_validate_json(stored.read_text())
    assert {(run.state, run.steps_done, len(run.checks)) for run in verdict.runs} == {("PASS", STEPS, 1)}
    assert len(verdict.runs) == cases
    return planned, ran


def test_a_few_cases_cost_no_more_each_than_many_may(tmp_path: Path) -> None:
    """The start of the command is what eight cases cannot carry, so planning them is taken off."""
    planned, ran = many_cases(tmp_path, 8)
    assert (ran.seconds - planned.seconds) / 8 < LIMIT_SECONDS_A_CASE
    assert ran.mib < LIMIT_MIB


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_cases(tmp_path: Path, benchmark: Any) -> None:
    planned, ran = benchmark.pedantic(many_cases, args=(tmp_path, CASES), rounds=1)
    benchmark.extra_info |= {
        "seconds a case": ran.seconds / CASES,
        "of it planning": planned.seconds / CASES,
        "MiB": ran.mib,
    }
    assert ran.seconds / CASES < LIMIT_SECONDS_A_CASE
    assert ran.mib < LIMIT_MIB


def many_runs(folder: Path, nights: int, runs_a_night: int) -> Path:
    """Write a results folder of so many suite runs with so many runs each; returns the last suite run."""
    metrics, record = healthy(make_case(BASE), 1, steps=STEPS)
    texts = {"metrics.json": json.dumps(metrics), "run.json": json.dumps(record)}
    last = folder
    for night in range(nights):
        last = folder / "results" / "many" / f"20260101-{night:06}-abcdef"
        verdicts = []
        for number in range(runs_a_night):
            run_dir = last / f"{BASE}-n{number}" / "1"
            run_dir.mkdir(parents=True)
            for name, text in texts.items():
                (run_dir / name).write_text(text)
            verdicts.append(
                RunVerdict(
                    case=run_dir.parent.name, repeat=1, pair=None, arm=None, state="PASS", steps_planned=STEPS
                )
            )
        verdict = SuiteVerdict(
            suite="many", started="2026-01-01", seconds=1.0, directory=str(last), runs=verdicts, pairs=[]
        )
        (last / "verdict.json").write_text(verdict.model_dump_json())
    return last


def starts(folder: Path, nights: int, runs_a_night: int) -> tuple[Cost, Cost]:
    """The cost of a suite of one case, and of a report, where so many runs lie."""
    last = many_runs(folder, nights, runs_a_night)
    report = cost_of("report", str(last), cwd=folder)
    assert report.done.returncode == 0, report.done.stderr
    run = cost_of("run", str(project(folder, 1)), cwd=folder)
    assert run.done.returncode == 0, run.done.stdout + run.done.stderr
    return report, run


def test_commands_start_at_once_beside_some_results(tmp_path: Path) -> None:
    report, run = starts(tmp_path, 5, 10)
    assert report.seconds < LIMIT_START_SECONDS
    assert run.seconds < LIMIT_START_SECONDS


@pytest.mark.slow
def test_commands_start_at_once_beside_many_results(tmp_path: Path, benchmark: Any) -> None:
    report, run = benchmark.pedantic(starts, args=(tmp_path, 100, RUNS // 100), rounds=1)
    benchmark.extra_info |= {"report, s": report.seconds, "run, s": run.seconds, "MiB": report.mib}
    assert report.seconds < LIMIT_START_SECONDS
    assert run.seconds < LIMIT_START_SECONDS


@pytest.mark.slow
def test_a_single_suite_run_of_many_runs_is_shown(tmp_path: Path, benchmark: Any) -> None:
    last = many_runs(tmp_path, 1, RUNS)
    report = benchmark.pedantic(cost_of, args=("report", str(last)), kwargs={"cwd": tmp_path}, rounds=1)
    benchmark.extra_info |= {"report, s": report.seconds, "MiB": report.mib}
    assert report.done.stdout.count("sft-tiny") == RUNS
    assert report.seconds < LIMIT_TABLE_SECONDS
