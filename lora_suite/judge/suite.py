# SPDX-License-Identifier: Apache-2.0
"""A suite's verdict: every planned run and pair gets one, whether or not anything was measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lora_suite.judge.canary import answered, injected
from lora_suite.judge.looks import confidence_of_look
from lora_suite.judge.pair import judge_pair
from lora_suite.judge.run import judge_run
from lora_suite.judge.statistics import CONFIDENCE, Prior
from lora_suite.judge.verdict import PairVerdict, RunVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Pair, Plan, PlannedRun, UnreadableCase

DID_NOT_RUN = "did not run"
Priors = Mapping[str, Mapping[str, Prior]]
"""What earlier repeats say of the spread, by a pair's name and the text of its check."""


@dataclass(frozen=True)
class Execution:
    """What the launcher saw of one run: how it ended, when it was launched, how long it took in seconds.

    again: why it was run again, of each time that the machines failed; a run that needed it is flagged.
    """

    ended: Ended
    launched: datetime
    seconds: float
    again: tuple[str, ...] = ()


def run_directory(results: Path, planned: PlannedRun) -> Path:
    """Where a planned run lies within the results of its suite."""
    return results / planned.case / str(planned.repeat)


def judge_suite(
    plan: Plan,
    results: Path,
    executions: Mapping[PlannedRun, Execution],
    *,
    absent: str = DID_NOT_RUN,
    priors: Priors | None = None,
) -> tuple[list[RunVerdict], list[PairVerdict]]:
    """Judge every run and pair of a plan; a run without an execution is MISSING, with `absent` as the reason.

    Both lists have the plan's order, and of everything planned there is a verdict. Of a discarded run there
    is one only where it broke. priors: by pair and check, what earlier repeats say of the spread.
    """
    judged = [
        judge_execution(plan, planned, run_directory(results, planned), executions.get(planned), absent)
        for planned in plan.runs
        if not planned.discarded or planned in executions
    ]
    runs = _without_copies([run for run in judged if run.repeat > 0 or run.state != "PASS"])
    return runs, [_judge_pair(plan, pair, runs, (priors or {}).get(pair.name)) for pair in plan.pairs]


def _judge_pair(
    plan: Plan, pair: Pair, runs: Sequence[RunVerdict], priors: Mapping[str, Prior] | None
) -> PairVerdict:
    """Judge one pair on the runs of a suite."""
    canary = pair.canary
    if canary is not None and canary.kind == "injected":
        arms = _runs_by_arm(_source(plan, pair), runs)
        normal, other = arms.values()
        first, second = pair.arms
        with tempfile.TemporaryDirectory(prefix="lora-suite-canary-") as folder:
            slowed = injected(other, canary.factor, Path(folder))
            verdict = judge_pair(pair, {first: normal, second: slowed}, priors)
    else:
        arms = _runs_by_arm(pair, runs)
        verdict = judge_pair(pair, arms, priors, _confidence(pair))
    verdict = answered(canary, verdict) if canary is not None else verdict
    notes = [*verdict.notes, *_look_notes(pair), *_health_notes(arms)]
    return verdict.model_copy(update={"notes": notes, "owner": pair.owner})


def _source(plan: Plan, pair: Pair) -> Pair:
    """The canary whose runs an injected one is judged on: of equal arms, and of the same case."""
    return next(
        other
        for other in plan.pairs
        if other.canary is not None
        and other.canary.kind == "same"
        and set(other.arms.values()) == set(pair.arms.values())
    )


def looks_made(pair: Pair) -> tuple[int, ...]:
    """The repeats after which a pair with looks was judged; the first, where it ended before that."""
    return tuple(look for look in pair.looks if look <= pair.repeats) or pair.looks[:1]


def _confidence(pair: Pair) -> float:
    """Confidence of the pair's intervals: an early look asks for more."""
    if not pair.looks:
        return CONFIDENCE
    return confidence_of_look(len(looks_made(pair)), len(pair.looks))


def _look_notes(pair: Pair) -> Iterator[str]:
    if pair.looks:
        *before, last = map(str, looks_made(pair))
        made = f"{', '.join(before)} and {last}" if before else last
        ended = f": {pair.ended}" if pair.ended else ""
        yield f"looked after {made} of at most {pair.looks[-1]} repeats{ended}"


def _health_notes(arms: Mapping[str, Sequence[RunVerdict]]) -> Iterator[str]:
    """What was wrong with the machine, by arm and the number of its run."""
    for arm, runs in arms.items():
        for number, run in enumerate(runs, 1):
            if run.health:
                yield f"{arm} run {number}: {'; '.join(run.health)}"


def judge_execution(
    plan: Plan,
    planned: PlannedRun,
    run_dir: Path,
    execution: Execution | None,
    absent: str = DID_NOT_RUN,
) -> RunVerdict:
    """Judge one run of a plan; without an execution it did not run, whatever lies in its place.

    absent: why it did not run, then.
    """
    case = plan.cases[planned.case]
    if execution is None:
        return RunVerdict(
            case=planned.case,
            repeat=planned.repeat,
            pair=planned.pair,
            arm=planned.arm,
            state="MISSING",
            own_state="MISSING",
            message=case.problem if isinstance(case, UnreadableCase) else absent,
            steps_planned=case.steps,
            owner=case.owner,
        )
    verdict = judge_run(
        case,
        planned,
        run_dir,
        execution.ended,
        launched=execution.launched,
        seconds=execution.seconds,
    )
    return verdict.model_copy(update={"health": [*execution.again, *verdict.health]})


def _runs_by_arm(pair: Pair, runs: Sequence[RunVerdict]) -> dict[str, list[RunVerdict]]:
    """The runs that a pair is judged on, by arm in the order of repeats.

    A pair that reuses runs takes those of its arms' cases, whichever pair made them.
    """
    measured = [run for run in runs if run.repeat > 0]
    return {
        arm: sorted(
            (
                run
                for run in measured
                if run.case == case and (pair.reuse or (run.pair, run.arm) == (pair.name, arm))
            ),
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
