# SPDX-License-Identifier: Apache-2.0
"""A step's change as a sum over its phases.

Medians of phases do not add up to the median of their sum. Means do, so each number here is a mean over one
set of steps, the same for the step and for all of its phases; what keeps single slow steps from ruling a mean
is that the set is trimmed (`lora_suite.judge.explain.steps`): of two runs with the same batches, the tenth of
the steps i with the least and that with the greatest right_i − left_i are left out on both sides; other runs
are trimmed by their own step times.

What no phase accounts for is a part of its own, `other`, so the parts' sum is the step's change exactly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lora_suite.judge.evidence import Evidence
from lora_suite.judge.explain.model import OTHER, Part, Side
from lora_suite.judge.explain.steps import Chosen, choose
from lora_suite.judge.statistics import CONFIDENCE, t_quantile
from lora_suite.plan.metric_names import PHASES, STEP_TIME

SMALLEST_CHANGE = 0.005
"""Share of a step below which there is nothing to explain: the least effect that the gates call one."""

_PREFIX = "timing/train/"
_NOT_PHASES = ("total_step_time", "step_time", "invariants")
_AFTER_THE_STEP = ("validation", "checkpointing")
# Share of the step by which its phases may exceed it before they are said to overlap.
_OVERLAP = 0.02
# Share of the step by which the trimmed steps must move the result to be told of.
_TAIL = 0.01


@dataclass(frozen=True)
class Decomposition:
    """The step and its parts, and which steps were compared."""

    step: Part
    parts: list[Part]
    changed: bool
    chosen: Chosen


def decompose(left: Side, right: Side, notes: list[str]) -> Decomposition:
    """Take a step's change apart; adds to `notes`. Raises NothingTimed."""
    chosen = choose(left, right, notes)
    names = _phases(left, right, chosen, notes)
    ours = [_means(run, names, chosen.timed, at) for run, at in zip(left.runs, chosen.left, strict=True)]
    theirs = [_means(run, names, chosen.timed, at) for run, at in zip(right.runs, chosen.right, strict=True)]
    step = _part("step", [sum_ for sum_, _ in ours], [sum_ for sum_, _ in theirs])
    told = abs(step.delta) > SMALLEST_CHANGE * step.left
    step = step.model_copy(update={"share": 1.0 if told else None})
    parts = []
    for index, name in enumerate([*names, OTHER]):
        part = _part(name, [means[index] for _, means in ours], [means[index] for _, means in theirs])
        share = part.delta / step.delta if told else None
        parts.append(part.model_copy(update={"share": share}))
    _tell_overlap(parts[-1], step, notes)
    _tell_tail(left, right, chosen, step, notes)
    parts.sort(key=lambda part: -part.delta if step.delta > 0 else part.delta)
    changed = told and (step.low is None or step.high is None or step.low > 0 or step.high < 0)
    return Decomposition(step, parts, changed, chosen)


def _phases(left: Side, right: Side, chosen: Chosen, notes: list[str]) -> list[str]:
    """Names of the phases that every run has timed at every step that is compared."""
    timed = [
        _complete(run, steps, chosen.timed)
        for side, at in ((left, chosen.left), (right, chosen.right))
        for run, steps in zip(side.runs, at, strict=True)
    ]
    common = set.intersection(*timed)
    lacking = sorted(set.union(*timed) - common)
    if lacking:
        notes.append(f"not timed in every run, and so part of `{OTHER}`: {', '.join(lacking)}")
    if not common:
        notes.append("no phase is timed on both sides: what made the difference cannot be told by phase")
    order = {name: place for place, name in enumerate(PHASES)}
    return sorted(common, key=lambda name: (order.get(name, len(order)), name))


def _complete(run: Evidence, steps: Sequence[int], timed: str) -> set[str]:
    """Phases that a run has timed at all of these steps."""
    beside = (*_NOT_PHASES, *(_AFTER_THE_STEP if timed == STEP_TIME else ()))
    names = {name.removeprefix(_PREFIX) for name in run.metrics if name.startswith(_PREFIX)}
    return {
        name
        for name in names.difference(beside)
        if all(math.isfinite(value) for value in _values(run, _PREFIX + name, steps))
    }


def _values(run: Evidence, metric: str, steps: Iterable[int]) -> list[float]:
    """Values of a metric at these steps, nan where there is none."""
    series = run.metrics[metric]
    return [math.nan if (value := series.at(step)) is None else value for step in steps]


def _means(
    run: Evidence, names: Sequence[str], timed: str, steps: Sequence[int]
) -> tuple[float, list[float]]:
    """Mean seconds of a run's step, and of each phase with the rest behind them."""
    step = statistics.fmean(_values(run, timed, steps))
    phases = [statistics.fmean(_values(run, _PREFIX + name, steps)) for name in names]
    return step, [*phases, step - math.fsum(phases)]


def _part(name: str, left: Sequence[float], right: Sequence[float]) -> Part:
    """One part from the runs of both sides, with the interval of its change where both have repeats."""
    ours, theirs = statistics.fmean(left), statistics.fmean(right)
    width = _half_width(left, right)
    delta = theirs - ours
    bounds = (None, None) if width is None else (delta - width, delta + width)
    return Part(phase=name, left=ours, right=theirs, delta=delta, low=bounds[0], high=bounds[1])


def _half_width(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a difference of means.

    Of as many runs on both sides Student's over their differences; else Welch's, Biometrika 34, 1947.
    """
    if min(len(left), len(right)) < 2:
        return None
    if len(left) == len(right):
        differences = [theirs - ours for ours, theirs in zip(left, right, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        degrees = float(len(differences) - 1)
    else:
        errors = [statistics.variance(side) / len(side) for side in (left, right)]
        error = math.sqrt(sum(errors))
        if error == 0.0:
            return 0.0
        weights = [each**2 / (len(side) - 1) for each, side in zip(errors, (left, right), strict=True)]
        degrees = error**4 / sum(weights)
    return t_quantile(0.5 + CONFIDENCE / 2, degrees) * error


def _tell_overlap(other: Part, step: Part, notes: list[str]) -> None:
    if min(other.left / step.left, other.right / step.right) < -_OVERLAP:
        notes.append(f"the phases overlap: they sum to more than the step, and `{OTHER}` is below zero")


def _tell_tail(left: Side, right: Side, chosen: Chosen, step: Part, notes: list[str]) -> None:
    """Say where the steps that were trimmed off tell another story: slow steps that come now and then."""
    means = []
    for side, kept, off in (
        (left, chosen.left, chosen.trimmed_left),
        (right, chosen.right, chosen.trimmed_right),
    ):
        each = [
            statistics.fmean(_values(run, chosen.timed, [*some, *rest]))
            for run, some, rest in zip(side.runs, kept, off, strict=True)
        ]
        means.append(statistics.fmean(each))
    whole = means[1] - means[0]
    if abs(whole - step.delta) > _TAIL * step.left:
        notes.append(
            f"over all steps, the {chosen.trimmed} that are left out here included, the step's difference is "
            f"{whole:+.3g} s"
        )
