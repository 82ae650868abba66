# SPDX-License-Identifier: Apache-2.0
"""One run's verdict, from its own directory.

The questions are asked in this order, and the first bad answer is the run's: did it end by itself; are the
files those of this run; did it reach the last declared step; are its series whole and finite, do its checks
hold, do the LoRA invariants hold; and, where all of that is fine, does the driver agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from lora_suite.config import recipe_hash
from lora_suite.judge.checks import judge_checks
from lora_suite.judge.drawn import drawn_series, phases
from lora_suite.judge.evidence import (
    REQUIRED_OF_OTHERS,
    REQUIRED_SERIES,
    Evidence,
    NoEvidence,
    identity_problem,
    read_evidence,
    series_problems,
)
from lora_suite.judge.fast_path import judge_fast_path
from lora_suite.judge.health import health_flags
from lora_suite.judge.invariants import judge_invariants, judge_recorded, not_applicable, not_measured
from lora_suite.judge.verdict import CheckVerdict, RunVerdict, State, worst
from lora_suite.launch.record import Ended
from lora_suite.plan.metric_names import FLOOR_RATIO, LOSS, STEP_TIME
from lora_suite.plan.model import BaseCase, Case, ExternalCase, PlannedRun

# Exit statuses by which a driver judges: a check failed, the run was short, no limit for this GPU.
_DRIVER_JUDGES = frozenset({1, 4, 5})
_HOW = {"killed": "killed", "oom": "out of memory", "timeout": "timeout", "failed": "crashed"}
# Steps at the start of each segment that the step time of a table leaves out.
_WARMUP = 3
# Share of its minutes beyond which a run is said to come close to its limit.
_HEADROOM = 0.8
# Enough of a hash to tell machines apart, short enough for a table.
_HASH_DIGITS = 8
_PEAK_MEMORY = "memory/peak_allocated_gib"
_SAMPLED_MEMORY = "ray/"

# What became of the run itself, and why; None where nothing is wrong so far.
_Own = tuple[State, str] | None


def judge_run(
    case: BaseCase,
    planned: PlannedRun,
    run_dir: Path,
    ended: Ended | None,
    *,
    launched: datetime | None = None,
    seconds: float | None = None,
) -> RunVerdict:
    """Judge one planned run on what lies in `run_dir`; never raises for what is (not) there.

    ended: how it ended as the launcher saw it; None asks run.json, and where that does not say, the run is
    MISSING. launched: files that claim an earlier start are another run's. seconds: wall-clock time.
    Of a discarded run only is asked whether it broke or fell short.
    """
    evidence: Evidence | None = None
    unreadable = ""
    try:
        evidence = read_evidence(run_dir)
    except NoEvidence as error:
        unreadable = str(error)
    if ended is None and evidence is not None:
        ended = evidence.record.ended

    checks: list[CheckVerdict] = []
    not_judged: list[str] = []
    counts = case.driver_judges and not planned.discarded
    reached = evidence.last_step if evidence is not None else 0
    own = _breakdown(ended)
    if own is None and evidence is None:
        own = "MISSING", unreadable
    if own is None and evidence is not None:
        own = _shortfall(case, evidence, ended, launched)
        if own is None and not planned.discarded:
            checks, not_judged = _contents(case, evidence)
    if own is None and ended is not None and ended.status != 0 and not _agrees(ended, checks, counts):
        who = "the driver" if isinstance(case, Case) else "the command"
        said = f"everything holds, but {who} ended with status {ended.status}"
        own = "ERROR", f"{said}{_last_lines(ended)}"
    own_state, message = own or ("PASS", "")
    measured = evidence if not planned.discarded else None
    return RunVerdict(
        case=planned.case,
        repeat=planned.repeat,
        pair=planned.pair,
        arm=planned.arm,
        state=worst([own_state, *(check.state for check in checks)]),
        own_state=own_state,
        message=message,
        directory=str(run_dir),
        run_id=evidence.record.run_id if evidence is not None else "",
        steps_done=reached,
        steps_planned=case.steps,
        seconds=seconds,
        checks=checks,
        not_judged=not_judged,
        owner=case.owner,
        notes=list(_headroom(case, seconds)) if own is None else [],
        **(_figures(measured) if measured is not None else {}),
    )


def _headroom(case: BaseCase, seconds: float | None) -> Iterator[str]:
    """A note where a run came close to its time limit: the next slow night would end it."""
    share = (seconds or 0.0) / (60.0 * case.minutes) if case.minutes else 0.0
    if share > _HEADROOM:
        yield f"took {100 * share:.0f} % of the {case.minutes:g} minutes that it may take"


def _figures(evidence: Evidence) -> dict[str, Any]:
    """What a verdict holds of a run besides its states, by the verdict's keys."""
    environment = evidence.record.environment
    strict = environment.strict if environment is not None else {}
    return {
        "summary": summary(evidence),
        "phases": phases(evidence, _WARMUP),
        "series": drawn_series(evidence),
        "health": health_flags(evidence.record),
        "environment": recipe_hash(strict)[:_HASH_DIGITS] if strict else "",
        "link": evidence.record.link,
        "floor_bound": evidence.record.floor.bound_by if evidence.record.floor is not None else "",
        "code": str(environment.soft.get("code") or "") if environment is not None else "",
    }


def summary(evidence: Evidence) -> dict[str, float]:
    """The figures of a run that tables show: final loss, peak memory, median step time and its floor.

    The floor is what no implementation can beat on this GPU. It is known to our trainer, and holds as well
    for an arm beside it that does the same work in the same layout.
    """
    figures: dict[str, float] = {}
    loss = evidence.metrics.get(LOSS)
    if loss is not None and loss.steps:
        figures["final_loss"] = loss.values[-1]
    times = evidence.measured(STEP_TIME, _WARMUP)
    if times:
        figures["median_step_time"] = statistics.median(times.values())
    over_floor = evidence.measured(FLOOR_RATIO, _WARMUP)
    floors = [seconds / over_floor[step] for step, seconds in times.items() if over_floor.get(step)]
    if floors:
        figures["floor_time"] = statistics.median(floors)
    series = evidence.metrics.get(_PEAK_MEMORY)
    peaks = [*series.values] if series is not None else []
    if not peaks:
        sampled = (each for name, each in evidence.metrics.items() if name.startswith(_SAMPLED_MEMORY))
        peaks = [value for each in sampled for value in each.values]
    if peaks:
        figures["peak_memory_gib"] = max(peaks)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _breakdown(ended: Ended | None) -> _Own:
    """Whether the run broke or was stopped. A driver that judged its run, however badly, did neither."""
    if ended is None or ended.how == "done":
        return None
    said = ended.message or f"exit status {ended.status}"
    if ended.how == "interrupted":
        return "MISSING", said
    return "ERROR", f"{_HOW[ended.how]}: {_place(ended)}{said}{_last_lines(ended)}"


def _shortfall(case: BaseCase, evidence: Evidence, ended: Ended | None, launched: datetime | None) -> _Own:
    """Whether what lies there is not this run, or not all of it."""
    stranger = identity_problem(evidence, case, launched)
    if stranger is not None:
        return "MISSING", stranger
    if evidence.last_step < case.steps:
        return "MISSING", f"reached {evidence.last_step} of {case.steps} steps"
    if ended is None:
        return "MISSING", "nothing says how the run ended"
    return None


def _contents(case: BaseCase, evidence: Evidence) -> tuple[list[CheckVerdict], list[str]]:
    """Verdicts of series, checks and invariants; and what does not apply."""
    checks, not_judged = judge_checks(case, evidence)
    ours = isinstance(case, Case)
    not_judged += case.left if isinstance(case, ExternalCase) else ()
    verdicts = [*series_problems(evidence, REQUIRED_SERIES if ours else REQUIRED_OF_OTHERS), *checks]
    if isinstance(case, Case) and case.recipe.policy.require_fast_path:
        verdicts.append(judge_fast_path(evidence.record))
    if case.lora:
        if isinstance(case, Case):
            skipped = not_applicable(case, evidence.first_step)
            verdicts += judge_invariants(evidence.record, skipped)
        else:
            skipped = not_measured(evidence.record)
            verdicts += judge_recorded(evidence.record, skipped)
        not_judged += [f"{name} ({reason})" for name, reason in skipped.items()]
    return verdicts, not_judged


def _agrees(ended: Ended, checks: list[CheckVerdict], counts: bool) -> bool:
    """Whether a driver's bad status is explained by a verdict of ours, or is one that does not count."""
    return ended.status in _DRIVER_JUDGES and (
        not counts or worst([check.state for check in checks]) != "PASS"
    )


def _place(ended: Ended) -> str:
    """Rank and step of a breakdown, where its message does not name the rank itself."""
    if ended.rank is None or f"rank {ended.rank}" in ended.message:
        return ""
    step = f", step {ended.step}" if ended.step is not None else ""
    return f"rank {ended.rank}{step}: "


def _last_lines(ended: Ended) -> str:
    return "".join(f"\n  {line}" for line in ended.last_lines)
