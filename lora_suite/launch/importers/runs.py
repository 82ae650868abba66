# SPDX-License-Identifier: Apache-2.0
"""What the runs of one training logged, and how they become one value a step.

A training that was resumed leaves several runs whose steps overlap: what an earlier run did beyond the point
where a later one took over never became part of the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from check_metrics.series import describe_steps, is_keyed_by_step
from lora_suite.config.errors import ConfigError

# The largest that check_metrics reads.
_MAX_STEP = 10**15

WITHOUT_STRICT = "without --strict the later one counts"


class Value(NamedTuple):
    """A number (NaN and infinities too) and the file, or file and line, that holds it."""

    number: float
    where: str


Values = dict[str, dict[int, Value]]
"""Metric to step to value."""


@dataclass
class Run:
    """What was logged between one start of a training and its end.

    where: the file, for messages. start, end: seconds of the wall clock; 0 where unknown.
    resumed_at: the first step, where the source names it.
    """

    where: str
    start: float = 0.0
    end: float = 0.0
    resumed_at: int | None = None
    values: Values = field(default_factory=dict)

    def put(self, metric: str, step: int, value: Value, strict: bool) -> None:
        """Take a value, over an earlier one for the same step; ConfigError if strict and they differ."""
        if not 0 <= step <= _MAX_STEP:
            raise ConfigError(f"{value.where}: {metric!r} has step {step}; steps are whole numbers from 0 on")
        steps = self.values.setdefault(metric, {})
        if strict and step in steps:
            _refuse_conflict(metric, step, steps[step], value, WITHOUT_STRICT)
        steps[step] = value


@dataclass(frozen=True)
class Log:
    """What a reader found: runs in the order of their starts, and what a user should know."""

    runs: list[Run]
    warnings: list[str]


@dataclass(frozen=True)
class Imported:
    """Metrics in the common shape: metric to step to value, null where it was not finite.

    warnings: one line each. segments: first step of the training and of each resume, as `check_metrics
    --segments` takes them.
    """

    metrics: dict[str, dict[str, float | None]]
    warnings: tuple[str, ...]
    segments: tuple[int, ...]


def refuse_conflicts(known: Values, more: Values, remedy: str) -> None:
    """Raise ConfigError, which names metric, step and both places, if values for one step differ."""
    for metric, steps in more.items():
        for step in steps.keys() & known.get(metric, {}).keys():
            _refuse_conflict(metric, step, known[metric][step], steps[step], remedy)


def _refuse_conflict(metric: str, step: int, first: Value, second: Value, remedy: str) -> None:
    both_nan = math.isnan(first.number) and math.isnan(second.number)
    if first.number != second.number and not both_nan:
        raise ConfigError(
            f"{metric!r} has two values at step {step}: {first.number!r} in {first.where} and "
            f"{second.number!r} in {second.where}; {remedy}"
        )


def join(log: Log, strict: bool) -> Imported:
    """One value a step: a later run's, which from its first step on replaces all that earlier runs did.

    strict: ConfigError where two runs disagree about a step.
    """
    runs = [run for run in log.runs if run.values]
    whole: Values = {}
    segments: list[int] = []
    warnings = list(log.warnings)
    for run in runs:
        values = _on_one_clock(run, runs[0].start)
        if strict:
            refuse_conflicts(whole, values, WITHOUT_STRICT)
        first = _first_step(run, whole if segments else None)
        if first is not None:
            if segments and (lost := _forget(whole, first)):
                warnings.append(
                    f"{run.where} goes on at step {first}; {lost} earlier values from there on are left out"
                )
            segments = [*(step for step in segments if step < first), first]
        for metric, steps in values.items():
            whole.setdefault(metric, {}).update(steps)
    metrics = {metric: _plain(steps) for metric, steps in sorted(whole.items()) if steps}
    return Imported(
        metrics=metrics,
        warnings=(*warnings, *_nonfinite(metrics)),
        segments=tuple(dict.fromkeys(max(step, 1) for step in segments)),
    )


def _on_one_clock(run: Run, origin: float) -> Values:
    """The values of a run, with seconds since its own start made seconds since the first run's.

    Otherwise the samples of a resumed run would cover those of the run before it.
    """
    shift = round(run.start - origin)
    if not shift:
        return run.values
    return {
        metric: steps if is_keyed_by_step(metric) else {step + shift: value for step, value in steps.items()}
        for metric, steps in run.values.items()
    }


def _first_step(run: Run, earlier: Values | None) -> int | None:
    """Where a run begins: at the step that its source names, else where its fullest metric begins.

    The fullest, of several the one that begins last, because a validation or a constant may be logged before
    the first step. Of a run after others only metrics that those have count; one that shares none resumes
    nothing (None).
    """
    counted = [
        steps
        for metric, steps in run.values.items()
        if is_keyed_by_step(metric) and (earlier is None or earlier.get(metric))
    ]
    if not counted:
        return None
    if run.resumed_at is not None:
        return run.resumed_at
    _, first = max((len(steps), min(steps)) for steps in counted)
    return first


def _forget(whole: Values, first: int) -> int:
    """Drop every value from a step on, and count them."""
    lost = 0
    for metric, steps in whole.items():
        if is_keyed_by_step(metric):
            kept = {step: value for step, value in steps.items() if step < first}
            lost += len(steps) - len(kept)
            whole[metric] = kept
    return lost


def _plain(steps: Mapping[int, Value]) -> dict[str, float | None]:
    return {
        str(step): value.number if math.isfinite(value.number) else None
        for step, value in sorted(steps.items())
    }


def _nonfinite(metrics: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    bad = {
        metric: [int(s) for s, value in steps.items() if value is None] for metric, steps in metrics.items()
    }
    return [
        f"{metric} is not finite at step {describe_steps(steps)}, which becomes null"
        for metric, steps in bad.items()
        if steps
    ]
