# SPDX-License-Identifier: Apache-2.0
"""Which steps of two sides are compared: after warm-up, the same ones where batches are, trimmed alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lora_suite.judge.block import first_unequal_step
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.explain.model import Side
from lora_suite.judge.steady import NotSteady, floor_steps, warmup_of
from lora_suite.plan.metric_names import STEP_TIME, TOTAL_STEP_TIME, VALID_TOKENS

TRIM = 0.1
"""Share of the steps that is left out at each end."""
WARMUP = 3
"""Steps at the start of each segment that are never looked at, fewer where a run is very short."""

Times = Mapping[int, float]


class NothingTimed(ValueError):
    """A side has no step times to compare; the text says which run."""


@dataclass(frozen=True)
class Chosen:
    """Steps that are compared, of each run of each side, and those that were trimmed off.

    timed: the metric that is the step. matched: the r-th runs of both sides are compared step by step.
    """

    timed: str
    matched: bool
    left: list[list[int]]
    right: list[list[int]]
    trimmed_left: list[list[int]]
    trimmed_right: list[list[int]]

    @property
    def trimmed(self) -> int:
        """How many steps a side were left out for being extreme."""
        return max(sum(map(len, self.trimmed_left)), sum(map(len, self.trimmed_right)))


def choose(left: Side, right: Side, notes: list[str]) -> Chosen:
    """Choose the steps; adds to `notes` what a reader must know. Raises NothingTimed."""
    timed = _step_metric(left, right)
    if timed == TOTAL_STEP_TIME:
        notes.append(
            "only totals are known on both sides: validation and checkpointing are parts of the step"
        )
    times = [[_times(run, timed, notes) for run in side.runs] for side in (left, right)]
    why_not = _unmatched(left, right)
    if why_not is not None:
        notes.append(f"steps are not matched: {why_not}")
        cut = [[_trim(run) for run in side] for side in times]
        kept_left, kept_right = ([keep for keep, _ in side] for side in cut)
        off_left, off_right = ([off for _, off in side] for side in cut)
        return Chosen(timed, False, kept_left, kept_right, off_left, off_right)
    kept, off = [], []
    for ours, theirs in zip(*times, strict=True):
        common = {step: theirs[step] - ours[step] for step in ours if step in theirs}
        if not common:
            raise NothingTimed(f"{left.name} and {right.name} have no step in common after warm-up")
        keep, drop = _trim(common)
        kept.append(keep)
        off.append(drop)
    return Chosen(timed, True, kept, kept, off, off)


def _step_metric(left: Side, right: Side) -> str:
    """The step's time that every run has: without validation and checkpointing, or else with them."""
    runs = [(directory, run) for side in (left, right) for directory, run in _named(side)]
    for name in (STEP_TIME, TOTAL_STEP_TIME):
        if all(name in run.metrics for _, run in runs):
            return name
    lacking = next(directory for directory, run in runs if STEP_TIME not in run.metrics)
    raise NothingTimed(f"{lacking}: metrics.json has no {STEP_TIME} (nor has every run {TOTAL_STEP_TIME})")


def _named(side: Side) -> list[tuple[object, Evidence]]:
    return list(zip(side.directories, side.runs, strict=True))


def _times(run: Evidence, timed: str, notes: list[str]) -> Times:
    """Step times of a run after its warm-up; finite ones alone."""
    warmup = min(WARMUP, len(run.metrics[timed].steps) // 2)
    try:
        found = warmup_of(run, warmup)
        warming = found.floor | found.more
    except NotSteady as error:
        notes.append(f"{run.record.case}: {error}")
        warming = floor_steps(run, warmup)
    series = run.metrics[timed].finite_part()
    times = {
        step: value
        for step, value in zip(series.steps, series.values, strict=True)
        if step not in warming and value > 0
    }
    if not times:
        raise NothingTimed(f"{run.record.case}: no step time is left after warm-up")
    return times


def _unmatched(left: Side, right: Side) -> str | None:
    """Why steps of both sides may not be compared one by one; None where they may."""
    if len(left.runs) != len(right.runs):
        return f"{len(left.runs)} and {len(right.runs)} runs"
    for ours, theirs in zip(left.runs, right.runs, strict=True):
        steps = range(max(ours.first_step, theirs.first_step), min(ours.last_step, theirs.last_step) + 1)
        for fingerprints in (_batches, _tokens):
            one, other = fingerprints(ours), fingerprints(theirs)
            if one and other:
                step = first_unequal_step(one, other, steps)
                if step is not None:
                    return f"step {step} had different batches"
                break
        else:
            return "a run says nothing of its batches"
    return None


def _batches(run: Evidence) -> Mapping[str, str]:
    return run.record.batches


def _tokens(run: Evidence) -> Mapping[str, str]:
    """Supervised tokens of each step: weak evidence of equal batches, all that other trainers give."""
    series = run.metrics.get(VALID_TOKENS)
    if series is None:
        return {}
    return {str(step): f"{value:.15g}" for step, value in zip(series.steps, series.values, strict=True)}


def _trim(values: Times) -> tuple[list[int], list[int]]:
    """Steps that stay, and those off: the `TRIM` share with the least and that with the greatest values."""
    ranked = sorted(values, key=lambda step: (values[step], step))
    cut = math.floor(TRIM * len(ranked))
    off = {*ranked[:cut], *ranked[len(ranked) - cut :]}
    return [step for step in values if step not in off], sorted(off)
