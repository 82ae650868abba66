# SPDX-License-Identifier: Apache-2.0
"""The functions of the language: plain functions on windows of series, and the table that describes their
calls.

A window that reaches a function holds at least one value, and only finite ones (`all_finite` alone sees the
others).
"""

import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from check_metrics.errors import DataError
from check_metrics.series import Series

RANGE_START = "range_start"
RANGE_END = "range_end"

BLOCKS_PER_GIB = 512
"""Blocks of 2 MiB, the smallest piece in which PyTorch's CUDA allocator asks the driver for memory."""

# What a spike is: well outside the others' scatter, and by something that matters.
SPIKE_DEVIATIONS = 5.0
SPIKE_SHARE = 0.10


@dataclass(frozen=True)
class Function:
    """How a function is called, and what computes it.

    `parameters` follow the series, in positional order. The one that is no end of the window is the
    function's own: `bounds` limits it (a constant), or, where None, it is any number. `default` None makes it
    required. `first_step` is the default `range_start`; None starts at the first recorded step. `matched`:
    two series must have equal steps.
    """

    compute: Callable[..., float]
    series: int = 1
    parameters: tuple[str, ...] = (RANGE_START, RANGE_END)
    first_step: int | None = None
    bounds: tuple[float, float] | None = None
    default: float | None = None
    matched: bool = True

    @property
    def argument(self) -> str | None:
        """Name of the function's own parameter, None where it has none."""
        own = (name for name in self.parameters if name not in (RANGE_START, RANGE_END))
        return next(own, None)


def lowest(window: Series) -> float:
    """Smallest value."""
    return min(window.values)


def highest(window: Series) -> float:
    """Largest value."""
    return max(window.values)


def mean(window: Series, ignore_top_p: float = 0.0) -> float:
    """Arithmetic mean, after the share `ignore_top_p` of the highest values (rounded up) is dropped; one
    stays.
    """
    if ignore_top_p == 0.0:
        return fmean(window.values)
    kept = int(len(window.values) * (1.0 - ignore_top_p))
    return fmean(sorted(window.values)[: max(kept, 1)])


def percentile(window: Series, p: float) -> float:
    """Value below which p percent of the values lie, linear between neighbours (numpy's default)."""
    ordered = sorted(window.values)
    rank = (len(ordered) - 1) * p / 100.0
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    share = rank - below
    return ordered[below] * (1.0 - share) + ordered[above] * share


def median(window: Series) -> float:
    """Middle value; the mean of the two middle ones for an even count."""
    return percentile(window, 50.0)


def ratio_above(window: Series, threshold: float) -> float:
    """Share of values >= threshold, 0 to 1."""
    return sum(value >= threshold for value in window.values) / len(window.values)


def std(window: Series) -> float:
    """Sample standard deviation (n - 1)."""
    _need_two(window, "std")
    center = fmean(window.values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in window.values) / (len(window.values) - 1))


def count(window: Series) -> float:
    """Number of values."""
    return float(len(window.values))


def first(window: Series) -> float:
    """Value of the earliest step."""
    return window.values[0]


def last(window: Series) -> float:
    """Value of the latest step."""
    return window.values[-1]


def slope(window: Series) -> float:
    """Change per step of the least-squares line through (step, value)."""
    _need_two(window, "slope")
    middle = fmean(window.steps)
    center = fmean(window.values)
    spread = math.fsum((step - middle) ** 2 for step in window.steps)
    covered = math.fsum(
        (step - middle) * (value - center) for step, value in zip(window.steps, window.values, strict=True)
    )
    return covered / spread


def all_finite(window: Series) -> float:
    """1 where no value is null, NaN or an infinity, else 0."""
    return float(window.finite)


def overhead(window: Series) -> float:
    """What rare large values add to the mean over the median: mean / median - 1."""
    _need_positive(window, "overhead")
    return fmean(window.values) / median(window) - 1.0


def spike_share(window: Series) -> float:
    """Share of values above median + max(5 · MAD, 10 % of it); MAD is the median absolute deviation."""
    limit = spike_limit(window.values)
    return sum(value > limit for value in window.values) / len(window.values)


def spike_limit(values: Sequence[float]) -> float:
    """Above what a value of these is a spike: their median + max(5 · MAD, 10 % of the median)."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle + max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * middle)


def ratio(left: Series, right: Series) -> float:
    """Typical left / right over equal steps: exp of the median of log(left / right), for positive values."""
    for window in (left, right):
        _need_positive(window, "ratio")
    logs = tuple(math.log(a) - math.log(b) for a, b in zip(left.values, right.values, strict=True))
    return math.exp(median(Series(left.name, left.steps, logs)))


def tail_ratio(left: Series, right: Series) -> float:
    """What recurring slow steps cost the left side more than the right; equal steps, positive values.

    The ratio of the means over the typical ratio. A step in ten that takes three times as long leaves the
    typical ratio as it is, and makes this 1.2 in a long run.
    """
    _need_two(left, "tail_ratio")
    typical = ratio(left, right)
    return mean_but_largest(left.values) / mean_but_largest(right.values) / typical


def mean_but_largest(values: Sequence[float]) -> float:
    """Mean of two values or more less the largest: one slow step, a compilation, is no tail."""
    return fmean(sorted(values)[:-1])


def peak_ratio(left: Series, right: Series) -> float:
    """Largest left / largest right, both GiB in whole blocks of 2 MiB, in which an allocator counts."""
    ours, theirs = (round(max(window.values) * BLOCKS_PER_GIB) for window in (left, right))
    if theirs <= 0:
        raise DataError(f'peak_ratio() divides by "{right.name}", whose peak is no block of 2 MiB')
    return ours / theirs


def max_rel_diff(left: Series, right: Series) -> float:
    """Largest |left - right| / |right| over equal steps; 0 where both are 0."""
    return max(map(abs, _relative_differences(left, right, "max_rel_diff")))


def mean_rel_diff(left: Series, right: Series) -> float:
    """Mean of (left - right) / |right| over equal steps, with its sign: an offset, where jitter cancels."""
    return fmean(_relative_differences(left, right, "mean_rel_diff"))


def _relative_differences(left: Series, right: Series, name: str) -> list[float]:
    differences = []
    for step, a, b in zip(left.steps, left.values, right.values, strict=True):
        if a != b and b == 0.0:
            raise DataError(f'{name}() divides by "{right.name}", which is 0 at step {step}')
        differences.append(0.0 if a == b else (a - b) / abs(b))
    return differences


def _need_positive(window: Series, name: str) -> None:
    bad = [step for step, value in zip(window.steps, window.values, strict=True) if value <= 0.0]
    if bad:
        raise DataError(f'{name}() needs positive values, and "{window.name}" is not at step {bad[0]}')


def _need_two(window: Series, name: str) -> None:
    if len(window.values) < 2:
        raise DataError(f'{name}() needs two values, and "{window.name}" has one in the window')


# mean and median start at step 1 in the field's checker, which leaves out a validation at step 0; min, max
# and ratio_above read everything. The other statistics follow the nearer of the two.
FUNCTIONS: dict[str, Function] = {
    "min": Function(lowest),
    "max": Function(highest),
    "mean": Function(
        mean,
        parameters=(RANGE_START, RANGE_END, "ignore_top_p"),
        first_step=1,
        bounds=(0.0, 1.0),
        default=0.0,
    ),
    "median": Function(median, first_step=1),
    "ratio_above": Function(ratio_above, parameters=("threshold", RANGE_START, RANGE_END)),
    "percentile": Function(
        percentile, parameters=("p", RANGE_START, RANGE_END), first_step=1, bounds=(0.0, 100.0)
    ),
    "std": Function(std, first_step=1),
    "slope": Function(slope, first_step=1),
    "count": Function(count),
    "len": Function(count),
    "first": Function(first),
    "last": Function(last),
    "all_finite": Function(all_finite),
    "overhead": Function(overhead, first_step=1),
    "spike_share": Function(spike_share, first_step=1),
    "ratio": Function(ratio, series=2),
    "tail_ratio": Function(tail_ratio, series=2),
    "peak_ratio": Function(peak_ratio, series=2, matched=False),
    "max_rel_diff": Function(max_rel_diff, series=2),
    "mean_rel_diff": Function(mean_rel_diff, series=2),
}

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def arithmetic(op: str, left: float, right: float) -> float:
    """`left op right`; DataError where that is no finite real number (a division by zero, an overflow)."""
    try:
        value = ARITHMETIC[op](left, right)
    except ZeroDivisionError:
        raise DataError(f"{left!r} {op} {right!r} divides by zero") from None
    except OverflowError:
        raise DataError(f"{left!r} {op} {right!r} is too large") from None
    if isinstance(value, complex) or not math.isfinite(value):
        raise DataError(f"{left!r} {op} {right!r} is not a finite real number")
    return value


def call(function: Function, windows: Sequence[Series], argument: float | None) -> float:
    """The function's value on its windows; DataError where it leaves the finite numbers."""
    arguments = () if argument is None else (argument,)
    try:
        value = function.compute(*windows, *arguments)
    except (OverflowError, ValueError):
        # fsum, exp and ** raise the first, fsum the second where infinities of both signs meet.
        raise DataError(f'the values of "{windows[0].name}" are too large to compute with') from None
    if not math.isfinite(value):
        raise DataError(f'the values of "{windows[0].name}" are too large to compute with')
    return value
