# SPDX-License-Identifier: Apache-2.0
"""Evaluates a check's tree on the series of its arms.

Every operand is evaluated, behind `and` and `or` too, and every series is looked at before it is used: what
is missing, empty or not finite raises DataError wherever in the check it stands, so no `or` and no `not` can
hide it.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from check_metrics.errors import DataError
from check_metrics.functions import COMPARISONS, FUNCTIONS, arithmetic, call
from check_metrics.series import (
    Series,
    cut_ranges,
    describe_ranges,
    describe_steps,
    is_per_step,
    matches,
    step_ranges,
)
from check_metrics.syntax import (
    Absolute,
    Arithmetic,
    Call,
    Compare,
    Constant,
    Contains,
    Extremum,
    Junction,
    Negative,
    Not,
    Number,
    Predicate,
    SeriesRef,
    StepValue,
    Truth,
    Window,
    Worst,
    reads_series,
)

_SHOWN_NAMES = 5
_NEARNESS = 0.5


@dataclass(frozen=True)
class Comparison:
    """Both sides of one comparison, and how far the value is from its limit.

    `margin_percent` is positive while the comparison holds: the distance to the limit in percent of the
    limit. None for == and !=, and for a limit of 0 or so small that the quotient is no finite number.
    `value_is_left` tells which side is the value.
    """

    left: float
    op: str
    right: float
    holds: bool
    margin_percent: float | None
    value_is_left: bool = True

    @property
    def value(self) -> float:
        """The side that is held against the limit."""
        return self.left if self.value_is_left else self.right


@dataclass
class Evaluator:
    """One evaluation of one check; collects the comparisons made and what a reader should know about them.

    `segments` are the first steps of the run and of each resume, empty where they are not known. `warmup`
    steps of each segment are left out of every window of a per-step series.
    """

    arms: Mapping[str, Mapping[str, Series]]
    segments: Sequence[int] = ()
    warmup: int = 0
    allow_nonfinite: Collection[str] = ()
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def truth(self, node: Truth) -> bool:
        """Whether the node holds; DataError where that cannot be said."""
        match node:
            case Compare():
                return self._compared(node)
            case Predicate(call=predicate):
                return self._all_finite(predicate)
            case Contains(series=ref, step=step):
                return self._contains(ref, step)
            case Not(operand=operand):
                return not self.truth(operand)
            case Junction(conjunction=conjunction, operands=operands):
                verdicts = [self.truth(operand) for operand in operands]
                return all(verdicts) if conjunction else any(verdicts)

    def number(self, node: Number) -> float:
        """Value of the node, always finite; DataError where it has none."""
        match node:
            case Constant(value=value):
                return value
            case StepValue(series=ref, step=step):
                return self._step_value(ref, step)
            case Call():
                return self._called(node)
            case Worst():
                return self._worst(node)
            case Arithmetic(op=op, left=left, right=right):
                return arithmetic(op, self.number(left), self.number(right))
            case Negative(operand=operand):
                return -self.number(operand)
            case Absolute(operand=operand):
                return abs(self.number(operand))
            case Extremum(highest=highest, operands=operands):
                values = [self.number(operand) for operand in operands]
                return max(values) if highest else min(values)

    def _compared(self, node: Compare) -> bool:
        left, right = self.number(node.left), self.number(node.right)
        holds = COMPARISONS[node.op](left, right)
        value_is_left = reads_series(node.left) or not reads_series(node.right)
        limit = right if value_is_left else left
        margin = _margin_percent(node.op, left, right, limit)
        self.comparisons.append(Comparison(left, node.op, right, holds, margin, value_is_left))
        return holds

    def _all_finite(self, predicate: Call) -> bool:
        (ref,) = predicate.series
        window = self._windowed(ref, predicate.window)
        if not window.finite:
            self.notes.append(f"{ref} is not finite at step {describe_steps(window.nonfinite_steps())}")
        return window.finite

    def _contains(self, ref: SeriesRef, step: int) -> bool:
        series = self._series(ref)
        if series.at(step) is not None:
            self._step_value(ref, step)
            return True
        self.notes.append(f"{ref} has no step {step}; it has {describe_steps(series.steps)}")
        return False

    def _step_value(self, ref: SeriesRef, step: int) -> float:
        series = self._series(ref)
        value = series.at(step)
        if value is None:
            raise DataError(f"{ref} has no step {step}; it has {describe_steps(series.steps)}")
        if not math.isfinite(value):
            raise DataError(f"{ref} is not finite at step {step}")
        return value

    def _called(self, node: Call) -> float:
        function = FUNCTIONS[node.function]
        argument = None if node.argument is None else self.number(node.argument)
        windows = [self._finite(ref, self._windowed(ref, node.window)) for ref in node.series]
        if function.series == 2 and function.matched:
            windows = self._matched(node, windows)
        return call(function, windows, argument)

    def _worst(self, node: Worst) -> float:
        names = self._matching(node.series)
        found: list[tuple[float, int, str]] = []
        for name in names:
            ref = SeriesRef(node.series.arm, name, node.series.column)
            window = self._finite(ref, self._windowed(ref, node.window))
            value = max(window.values) if node.highest else min(window.values)
            found.append((value, window.steps[window.values.index(value)], name))
        value, step, name = (max if node.highest else min)(found, key=lambda each: each[0])
        self.notes.append(f'worst of {len(names)}: "{name}" at step {step}')
        return value

    def _matching(self, ref: SeriesRef) -> list[str]:
        names = [name for name in self.arms[ref.arm] if matches(name, ref.metric)]
        if not names:
            raise DataError(f"no metric matches {ref}; {self._nearest(ref)}")
        return names

    def _series(self, ref: SeriesRef) -> Series:
        series = self.arms[ref.arm].get(ref.metric)
        if series is None:
            raise DataError(f"no metric {ref}; {self._nearest(ref)}")
        if not series.steps:
            raise DataError(f"{ref} is empty")
        return series

    def _nearest(self, ref: SeriesRef) -> str:
        names = list(self.arms[ref.arm])
        if not names:
            return "the file has no metric at all"
        near = difflib.get_close_matches(ref.metric, names, _SHOWN_NAMES, _NEARNESS)
        if near:
            return "nearest: " + ", ".join(f'"{name}"' for name in near)
        shown = ", ".join(f'"{name}"' for name in names[:_SHOWN_NAMES])
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        return f"there are {shown}{more}"

    def _windowed(self, ref: SeriesRef, asked: Window) -> Series:
        """The part of a series that is judged: complete and not empty."""
        series = self._series(ref)
        window = series.window(asked.start, asked.end)
        if is_per_step(ref.metric):
            cuts = self._warmup_ranges()
            holes = cut_ranges(series.missing(*self._expected(series, asked)), cuts)
            if holes:
                raise DataError(f"{ref} misses step {describe_ranges(holes)}, inside the window")
            whole, window = window, window.without(cuts)
            if len(whole.steps) > len(window.steps):
                dropped = sorted({*whole.steps} - {*window.steps})
                self.notes.append(f"{ref}: warm-up step {describe_steps(dropped)} left out")
        if not window.steps:
            raise DataError(f"{ref} has no value in the window; it has step {describe_steps(series.steps)}")
        return window

    def _expected(self, series: Series, asked: Window) -> tuple[int, int]:
        """Which steps (first, exclusive end) a per-step series must have for a window.

        A window whose two ends are named must be there as named. Any other begins with the first recorded
        step, because the file of a resumed run may hold its own steps only; where the segments are known and
        none begins there, a named start is taken at its word.
        """
        first, stop = series.bounds(asked.start, asked.end)
        recorded = series.steps[0]
        lost_head = asked.names_start and self.segments and recorded not in self.segments
        if asked.is_closed or lost_head:
            return max(first, 1), stop
        return max(first, recorded), stop

    def _warmup_ranges(self) -> list[range]:
        return [range(first, first + self.warmup) for first in sorted({1, *self.segments})]

    def _finite(self, ref: SeriesRef, window: Series) -> Series:
        if window.finite:
            return window
        where = describe_steps(window.nonfinite_steps())
        if not any(matches(ref.metric, name) for name in self.allow_nonfinite):
            raise DataError(f"{ref} is not finite at step {where}")
        kept = window.finite_part()
        if not kept.steps:
            raise DataError(f"{ref} has no finite value in the window")
        self.notes.append(f"{ref}: not finite at step {where}, left out")
        return kept

    def _matched(self, node: Call, windows: Sequence[Series]) -> list[Series]:
        """Both windows cut to equal steps; only a value that may be non-finite can shorten them."""
        left, right = windows
        for ref, other, here, there in (
            (node.series[0], node.series[1], left, right),
            (node.series[1], node.series[0], right, left),
        ):
            left_out = {*self._series(other).nonfinite_steps()}
            lonely = sorted({*here.steps} - {*there.steps} - left_out)
            if lonely:
                raise DataError(f"step {describe_ranges(step_ranges(lonely))} of {ref} is not in {other}")
        shared = {*left.steps} & {*right.steps}
        if not shared:
            raise DataError(f"{node.series[0]} and {node.series[1]} share no finite step")
        return [_only(window, shared) for window in windows]


def _only(window: Series, steps: Collection[int]) -> Series:
    lonely = [range(step, step + 1) for step in window.steps if step not in steps]
    return window.without(lonely)


def _margin_percent(op: str, left: float, right: float, limit: float) -> float | None:
    if op in ("==", "!=") or limit == 0.0:
        return None
    slack = right - left if op.startswith("<") else left - right
    margin = 100.0 * (slack / abs(limit))
    return margin if math.isfinite(margin) else None
