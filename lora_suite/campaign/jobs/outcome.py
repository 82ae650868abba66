# SPDX-License-Identifier: Apache-2.0
"""What became of a unit, from what its job wrote and from how Slurm says that it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from lora_suite.campaign.adaptive import Schedule
from lora_suite.campaign.jobs.journal import (
    Lines,
    UnitState,
    attempt_lines,
    execution_from_json,
    run_from_json,
)
from lora_suite.campaign.jobs.part import checkpoints
from lora_suite.campaign.jobs.units import Unit
from lora_suite.judge.suite import DID_NOT_RUN, Execution
from lora_suite.judge.verdict import PairVerdict
from lora_suite.launch.record import Ended
from lora_suite.launch.site import Site
from lora_suite.launch.slurm.faults import ended_by, machines_fault
from lora_suite.launch.slurm.scheduler import Job
from lora_suite.plan.model import Pair, Plan, PlannedRun


@dataclass
class Outcome:
    """What one job of a unit did.

    begun: runs that it started. executions: of those that ended. finished: whether it came to its own end.
    runs, pairs: what was carried out, where it finished. broke: why it could not work at all.
    """

    begun: list[PlannedRun] = field(default_factory=list)
    executions: dict[PlannedRun, Execution] = field(default_factory=dict)
    finished: bool = False
    interrupted: bool = False
    runs: list[PlannedRun] = field(default_factory=list)
    pairs: dict[str, tuple[int, str]] = field(default_factory=dict)
    absent: str = DID_NOT_RUN
    broke: str = ""
    checkpoints: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, lines: Lines) -> Outcome:
        """Read what a job wrote. A job that Slurm started again begins anew."""
        outcome = cls()
        for event in lines:
            match event["event"]:
                case "begin":
                    outcome = cls(checkpoints=event["checkpoints"])
                case "run":
                    outcome.begun.append(run_from_json(event["run"]))
                case "ended":
                    execution = execution_from_json(event["execution"])
                    outcome.executions[run_from_json(event["run"])] = execution
                case "finished":
                    outcome.finished, outcome.interrupted = True, event["interrupted"]
                    outcome.runs = [run_from_json(run) for run in event["runs"]]
                    pairs = event["pairs"].items()
                    outcome.pairs = {name: (pair["repeats"], pair["ended"]) for name, pair in pairs}
                    outcome.absent = event["absent"]
                case "broke":
                    outcome.broke = event["message"]
        return outcome

    @property
    def complete(self) -> bool:
        """Whether nothing stopped it: then how Slurm says that the job ended adds nothing."""
        return self.finished and not self.interrupted


@dataclass(frozen=True)
class Done:
    """A unit that has come to its end: the part of the plan that was carried out, and its executions."""

    part: Plan
    executions: Mapping[PlannedRun, Execution]


def fault_of(outcome: Outcome, job: Job) -> str:
    """Why a unit is to be repeated, in words; empty where the machines are not at fault."""
    return "" if outcome.complete else machines_fault(job)


def continues(results: Path, unit: Unit, state: UnitState, outcome: Outcome, job: Job) -> bool:
    """Whether a run in segments ran out of time with a newer checkpoint, and has segments left."""
    if unit.segments == 1 or state.segments >= unit.segments:
        return False
    ends = [execution.ended.how for execution in outcome.executions.values()]
    timed_out = "timeout" in ends or (not outcome.complete and job.state == "TIMEOUT")
    return timed_out and [str(path) for path in checkpoints(results, unit)] != outcome.checkpoints


def settle(results: Path, unit: Unit, state: UnitState, outcome: Outcome, job: Job, site: Site) -> Done:
    """Name the end of every run of a unit whose last job has ended.

    Where the job was stopped, the run that it was in has the job's end, and those after it did not run.
    """
    executions = dict(outcome.executions)
    if unit.segments > 1:
        executions = {run: _joined(results, unit, state, run, each) for run, each in executions.items()}
    if outcome.complete:
        return Done(_carried_out(unit, outcome), executions)
    ended = ended_by(job, unit.resources(site).whole_minutes)
    if outcome.broke:
        ended = Ended(how="failed", status=3, message=f"job {job.id}: {outcome.broke}")
    part = _asked(unit, [*outcome.begun, *executions])
    again = tuple(state.faults)
    stopped = False
    for planned in part.runs:
        seen = executions.get(planned)
        if seen is not None and seen.ended.how != "interrupted":
            continue
        if not stopped:
            stopped = True
            lines = seen.ended.last_lines if seen is not None else []
            seen = seen or _nothing(ended)
            told = ended.model_copy(update={"last_lines": ended.last_lines or lines})
            executions[planned] = replace(seen, ended=told, again=again)
        else:
            message = f"{DID_NOT_RUN}: {ended.message}"
            executions[planned] = _nothing(Ended(how="interrupted", status=130, message=message))
    return Done(part, executions)


def _nothing(ended: Ended) -> Execution:
    return Execution(ended, datetime.now(UTC), 0.0)


def _joined(results: Path, unit: Unit, state: UnitState, run: PlannedRun, last: Execution) -> Execution:
    """The last segment's execution, with the time of all."""
    before = [
        Outcome.read(attempt_lines(results, unit.name, number)).executions.get(run)
        for number in range(1, state.attempt)
    ]
    return replace(last, seconds=last.seconds + sum(each.seconds for each in before if each is not None))


def _carried_out(unit: Unit, outcome: Outcome) -> Plan:
    return replace(unit.part, runs=tuple(outcome.runs), pairs=tuple(_made(unit.part.pairs, outcome)))


def _made(pairs: tuple[Pair, ...], outcome: Outcome) -> list[Pair]:
    known = outcome.pairs
    return [replace(pair, repeats=known[pair.name][0], ended=known[pair.name][1]) for pair in pairs]


def _asked(unit: Unit, seen: list[PlannedRun]) -> Plan:
    """What a unit had been asked for when it was stopped: its first look, and what it began beyond."""
    first = Schedule(unit.part, {}, _no_judge).carried_out()
    runs = [run for run in unit.part.runs if run in first.runs or run in seen]
    return replace(first, runs=tuple(runs))


def _no_judge(plan: Plan) -> PairVerdict:
    raise AssertionError("a schedule that is not iterated over judges nothing")
