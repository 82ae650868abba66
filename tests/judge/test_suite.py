# SPDX-License-Identifier: Apache-2.0
"""A suite's verdict is complete: whatever is planned gets a verdict, and pairs find their runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist

import pytest

from lora_suite.judge.suite import Execution, judge_suite, run_directory
from lora_suite.judge.verdict import EXIT_CODES, State, SuiteVerdict, worst
from lora_suite.plan.model import Plan, PlannedRun
from tests.judge.helpers import DONE, FULL, LORA, make_pair, make_plan, write_run

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def execute(plan: Plan, results: Path) -> dict[PlannedRun, Execution]:
    """Write a healthy run for everything planned."""
    for run in plan.runs:
        case = plan.cases[run.case]
        step_time = 0.1 * (0.7 if case.lora else 1.0) * (1 + run.repeat / 1000)
        write_run(run_directory(results, run), case, run.repeat, step_time=step_time)
    return {run: Execution(DONE, NOW, 1.0) for run in plan.runs}


def test_everything_planned_gets_a_verdict(tmp_path):
    plan = make_plan()
    runs, pairs = judge_suite(plan, tmp_path, execute(plan, tmp_path))
    assert [(run.case, run.repeat) for run in runs] == [(run.case, run.repeat) for run in plan.runs]
    assert {run.state for run in runs} == {"PASS"}
    assert [pair.state for pair in pairs] == ["PASS"]


def test_what_was_not_executed_is_missing_even_if_files_lie_there(tmp_path):
    plan = make_plan()
    executions = execute(plan, tmp_path)
    del executions[plan.runs[3]]
    runs, pairs = judge_suite(plan, tmp_path, executions)
    assert len(runs) == len(plan.runs)
    assert (runs[3].state, runs[3].message) == ("MISSING", "did not run")
    assert pairs[0].state == "MISSING"


def test_nothing_executed_leaves_every_verdict_missing(tmp_path):
    plan = make_plan()
    runs, pairs = judge_suite(plan, tmp_path, {})
    assert {run.state for run in runs} | {pair.state for pair in pairs} == {"MISSING"}


@pytest.mark.parametrize(
    ("repeats", "ended", "note", "quantile"),
    [
        (2, "", "looked after 2 of at most 8 repeats", 4.0486),
        (4, "decided", "looked after 2 and 4 of at most 8 repeats: decided", 2.8628),
        (8, "", "looked after 2, 4, 6 and 8 of at most 8 repeats", 2.0243),
    ],
)
def test_an_early_look_is_told_and_asks_for_more(tmp_path, repeats, ended, note, quantile):
    """O'Brien and Fleming's constant of four looks is 2.0243; look k has its √(4 / k) fold."""
    plan = make_plan(make_pair(repeats=repeats, looks=(2, 4, 6, 8), ended=ended))
    (pair,) = judge_suite(plan, tmp_path, execute(plan, tmp_path))[1]
    assert note in pair.notes
    confidence = pair.checks[0].effect.confidence
    assert NormalDist().inv_cdf(0.5 + confidence / 2) == pytest.approx(quantile, abs=1e-4)


def test_a_reusing_pair_takes_the_runs_of_other_pairs(tmp_path):
    reusing = make_pair(name="again", reuse=True)
    plan = make_plan(pairs=(make_pair(), reusing))
    _, pairs = judge_suite(plan, tmp_path, execute(plan, tmp_path))
    assert [pair.state for pair in pairs] == ["PASS", "PASS"]
    assert pairs[0].checks[0].effect == pairs[1].checks[0].effect


def test_a_pair_that_makes_its_runs_takes_no_others(tmp_path):
    """A case that two pairs run counts on: runs 1 and 2 are the first pair's, 3 and 4 the second's."""
    first, second = make_pair(repeats=2, name="first"), make_pair(repeats=2, name="second")
    runs = [
        PlannedRun(case, repeat, pair, arm)
        for repeat, pair in ((1, "first"), (2, "first"), (3, "second"), (4, "second"))
        for arm, case in (("full", FULL), ("lora", LORA))
    ]
    plan = make_plan(pairs=(first, second), runs=tuple(runs))
    executions = execute(plan, tmp_path)
    lost = next(run for run in runs if (run.case, run.repeat) == (LORA, 4))
    del executions[lost]
    _, pairs = judge_suite(plan, tmp_path, executions)
    assert [pair.state for pair in pairs] == ["PASS", "MISSING"]
    assert pairs[1].message == "lora run 2: MISSING did not run"


def test_swapped_directories_do_not_pass(tmp_path):
    plan = make_plan()
    executions = execute(plan, tmp_path)
    (tmp_path / FULL / "1").rename(tmp_path / "aside")
    (tmp_path / LORA / "1").rename(tmp_path / FULL / "1")
    (tmp_path / "aside").rename(tmp_path / LORA / "1")
    runs, pairs = judge_suite(plan, tmp_path, executions)
    assert [run.state for run in runs[:2]] == ["MISSING", "MISSING"]
    assert pairs[0].state == "MISSING"


def test_a_copy_of_another_run_does_not_pass(tmp_path):
    plan = make_plan()
    executions = execute(plan, tmp_path)
    shutil.copytree(tmp_path / FULL / "1", tmp_path / FULL / "2", dirs_exist_ok=True)
    runs, pairs = judge_suite(plan, tmp_path, executions)
    assert (runs[2].state, runs[2].message) == ("MISSING", f"its run.json is that of {FULL} run 1")
    assert pairs[0].message == f"full run 2: MISSING its run.json is that of {FULL} run 1"


def verdict_of(*states: State, interrupted: bool = False) -> SuiteVerdict:
    """A verdict with pairs of these states."""
    _, pairs = judge_suite(make_plan(), Path("none"), {})
    return SuiteVerdict(
        suite="s",
        started="",
        seconds=0,
        directory="",
        interrupted=interrupted,
        runs=[],
        pairs=[pairs[0].model_copy(update={"state": state}) for state in states],
    )


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ((), 4),
        (("PASS", "PASS"), 0),
        (("PASS", "INCONCLUSIVE"), 5),
        (("INCOMPARABLE", "PASS"), 5),
        (("INCONCLUSIVE", "FAIL"), 1),
        (("INCOMPARABLE", "FAIL"), 1),
        (("FAIL", "MISSING", "PASS"), 4),
        (("FAIL", "MISSING", "ERROR", "INCONCLUSIVE"), 3),
    ],
)
def test_exit_codes_and_what_wins(states, code):
    assert verdict_of(*states).exit_code == code
    assert verdict_of(*states, interrupted=True).exit_code == 130
    assert verdict_of(*reversed(states)).exit_code == code


def test_only_pass_is_green():
    assert [state for state, code in EXIT_CODES.items() if code == 0] == ["PASS"]
    assert worst(["PASS"]) == "PASS"


def test_the_verdict_survives_its_file():
    verdict = verdict_of("PASS", "FAIL")
    assert SuiteVerdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert "PairVerdict" in SuiteVerdict.model_json_schema()["$defs"]


def test_a_repeat_of_another_case_has_its_own_folder():
    runs = make_plan().runs
    assert len({run_directory(Path("r"), run) for run in runs}) == len(runs)
    assert run_directory(Path("r"), replace(runs[0], repeat=7)) == Path("r") / FULL / "7"
