# SPDX-License-Identifier: Apache-2.0
"""An independent, naive reading of the language: Python's own evaluation, functions on plain dictionaries.

Only for expressions that the tests themselves generate, on complete and finite series.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

Steps = Mapping[str, float]


def cut(steps: Steps, range_start: int | None, range_end: int = 0) -> dict[int, float]:
    """The window, as the field's checker cuts it: by step number, with an offset for resumed runs."""
    last = max(int(step) for step in steps)
    offset = last - len(steps)
    start = min(int(step) for step in steps) if range_start is None else range_start
    if start < 0:
        start += len(steps) + 1 + offset
    if range_end <= 0:
        range_end += len(steps) + 1 + offset
    return {int(step): float(value) for step, value in steps.items() if start <= int(step) < range_end}


def mean(steps: Steps, range_start: int = 1, range_end: int = 0, ignore_top_p: float = 0.0) -> float:
    """Mean without the highest share."""
    values = list(cut(steps, range_start, range_end).values())
    if ignore_top_p > 0.0:
        ranked = sorted(values)
        kept = int(len(ranked) * (1.0 - ignore_top_p))
        values = ranked[:kept] if kept > 0 else ranked[:1]
    return statistics.mean(values)


def percentile(steps: Steps, p: float, range_start: int = 1, range_end: int = 0) -> float:
    """numpy's default percentile."""
    return float(np.percentile(list(cut(steps, range_start, range_end).values()), p))


def ratio_above(steps: Steps, threshold: float, range_start: int | None = None, range_end: int = 0) -> float:
    """Share of values that reach the threshold."""
    values = list(cut(steps, range_start, range_end).values())
    return len([value for value in values if value >= threshold]) / len(values)


def slope(steps: Steps, range_start: int = 1, range_end: int = 0) -> float:
    """statistics' linear regression."""
    window = cut(steps, range_start, range_end)
    return statistics.linear_regression(list(window), list(window.values())).slope


def ratio(left: Steps, right: Steps, range_start: int | None = None, range_end: int = 0) -> float:
    """exp of the median log ratio."""
    a, b = cut(left, range_start, range_end), cut(right, range_start, range_end)
    return math.exp(statistics.median(math.log(a[step] / b[step]) for step in a))


def max_rel_diff(left: Steps, right: Steps, range_start: int | None = None, range_end: int = 0) -> float:
    """Largest relative difference."""
    a, b = cut(left, range_start, range_end), cut(right, range_start, range_end)
    return float(max(np.abs(np.subtract(list(a.values()), list(b.values()))) / np.abs(list(b.values()))))


def _extremum(pick: Any) -> Any:
    def call(first: Any, *rest: float, range_start: int | None = None, range_end: int = 0) -> float:
        if not isinstance(first, Mapping):
            return float(pick(first, *rest))
        window = cut(first, *(rest or (range_start, range_end)))
        return float(pick(window.values()))

    return call


FUNCTIONS: dict[str, Any] = {
    "min": _extremum(min),
    "max": _extremum(max),
    "mean": mean,
    "median": lambda steps, start=1, end=0: statistics.median(cut(steps, start, end).values()),
    "ratio_above": ratio_above,
    "percentile": percentile,
    "std": lambda steps, start=1, end=0: statistics.stdev(cut(steps, start, end).values()),
    "slope": slope,
    "count": lambda steps, start=None, end=0: len(cut(steps, start, end)),
    "first": lambda steps, start=None, end=0: next(iter(sorted(cut(steps, start, end).items())))[1],
    "last": lambda steps, start=None, end=0: sorted(cut(steps, start, end).items())[-1][1],
    "all_finite": lambda steps, start=None, end=0: all(map(math.isfinite, cut(steps, start, end).values())),
    "ratio": ratio,
    "max_rel_diff": max_rel_diff,
    "abs": abs,
    "abs_slope": lambda *arguments: abs(slope(*arguments)),
}


def answer(text: str, arms: Mapping[str, Mapping[str, Steps]]) -> Any:
    """The value of an expression that a test has generated."""
    return eval(text, {"__builtins__": {}}, {**FUNCTIONS, **arms})


def magnitude(text: str, arms: Mapping[str, Mapping[str, Steps]]) -> float:
    """How large the numbers are that a difference may cancel: the same text with + for -, and * for /."""
    grown = text.replace(" - ", " + ").replace("-(", "(").replace(" / ", " * ")
    return abs(float(answer(grown.replace("slope(", "abs_slope("), arms)))
