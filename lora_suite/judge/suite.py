# SPDX-License-Identifier: Apache-2.0
"""A suite's verdict: every planned run and pair gets one, whether or not anything was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lora_suite.judge.pair import judge_pair
from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import PairVerdict, RunVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Pair, Plan, PlannedRun, UnreadableCase


@dataclass(frozen=True)
class Execution:
    """What the launcher saw of one run: how it ended, when it was launched, how long it took in seconds."""

    ended: Ended
    launched: datetime
    seconds: float


def run_directory(results: Path, planned: PlannedRun) -> Path:
    """Where a planned run lies within the results of its suite."""
    return results / planned.case / str(planned.repeat)


def judge_suite(
    plan: Plan, results: Path, executions: Mapping[PlannedRun, Execution]
) -> tuple[list[RunVerdict], list[PairVerdict]]:
    """Judge every run and pair of a plan; a run without an execution is MISSING.

    Both lists have the plan's order and length, so that nothing planned can go without a verdict.
    """
    runs = _without_copies(
        [
            judge_execution(plan, planned, run_directory(results, planned), executions.get(planned))
            for planned in plan.runs
        ]
    )
    return runs, [judge_pair(pair, _runs_by_arm(pair, runs)) for pair in plan.pairs]


def judge_execution(
    plan: Plan, planned: PlannedRun, run_dir: Path, execution: Execution | None
) -> RunVerdict:
    """Judge one run of a plan; without an execution it did not run, whatever lies in its place."""
    case = plan.cases[planned.case]
    if execution is None:
        return RunVerdict(
            case=planned.case,
            repeat=planned.repeat,
            pair=planned.pair,
            arm=planned.arm,
            state="MISSING",
            own_state="MISSING",
            message=case.problem if isinstance(case, UnreadableCase) else "did not run",
            steps_planned=case.steps,
        )
    return judge_run(
        case,
        planned,
        run_dir,
        execution.ended,
        launched=execution.launched,
        seconds=execution.seconds,
    )


def _runs_by_arm(pair: Pair, runs: Sequence[RunVerdict]) -> dict[str, list[RunVerdict]]:
    """The runs that a pair is judged on, by arm in the order of repeats.

    A pair that reuses runs takes those of its arms' cases, whichever pair made them.
    """
    return {
        arm: sorted(
            (run for run in runs if run.case == case and (pair.reuse or run.pair == pair.name)),
            key=lambda run: run.repeat,
        )
        for arm, case in pair.arms.items()
    }


def _without_copies(runs: Sequence[RunVerdict]) -> list[RunVerdict]:
    """The runs, with every later one whose record is a copy of an earlier one's turned to MISSING."""
    owners: dict[str, RunVerdict] = {}
    judged = []
    for run in runs:
        owner = owners.setdefault(run.run_id, run) if run.own_state == "PASS" else run
        if owner is not run:
            copied = f"its run.json is that of {owner.case} run {owner.repeat}"
            run = run.model_copy(update={"state": "MISSING", "own_state": "MISSING", "message": copied})
        judged.append(run)
    return judged
