# SPDX-License-Identifier: Apache-2.0
"""Axes of a chart: a range of values, its round ticks, and where a value lies on the drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_suite.report.words import figure

# Values this many interquartile ranges beyond the quartiles are drawn at the edge: one slow step must not
# squeeze all others into a line.
_FAR = 8.0
# A logarithmic axis over a greater factor has its ticks at powers of ten.
_WIDE = 3.0
# A range shorter than this share of its values is one value, give or take its last digits.
_SMALL = 1e-9


@dataclass(frozen=True)
class Tick:
    """A round value of an axis: where it lies, and its text."""

    position: float
    text: str


@dataclass(frozen=True)
class Axis:
    """Values from `first` to `last`, drawn from `start` to `end` (px); beyond them, at the edge.

    log: equal ratios take equal lengths; both ends are then positive.
    """

    label: str
    first: float
    last: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value, to a tenth of a px."""
        inside = min(max(value, self.first), self.last)
        share = (self._scaled(inside) - self._scaled(self.first)) / self._span
        return round(self.start + share * (self.end - self.start), 1)

    def holds(self, value: float) -> bool:
        """Whether a value lies on the axis, its ends included."""
        return self.first <= value <= self.last

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round values."""
        if self.log and self.last / self.first > _WIDE:
            return self._log_ticks(count)
        step = round_step((self.last - self.first) / max(count, 1))
        number = math.ceil(self.first / step)
        values = []
        while number * step <= self.last + 1e-9 * step:
            values.append(number * step)
            number += 1
        places = max(0, -math.floor(math.log10(step) + 1e-9))
        plain = 1e-3 <= max(abs(self.first), abs(self.last)) < 1e6
        return [Tick(self(value), f"{value:.{places}f}" if plain else f"{value:.3g}") for value in values]

    def _log_ticks(self, count: int) -> list[Tick]:
        """1, 2, 5 times powers of ten; on a long axis powers of ten alone."""
        powers = range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1)
        factors = (1, 2, 5) if 3 * len(powers) <= 2 * count else (1,)
        values = [factor * 10.0**power for power in powers for factor in factors]
        return [Tick(self(value), f"{value:g}") for value in values if self.holds(value)]

    @property
    def _span(self) -> float:
        return self._scaled(self.last) - self._scaled(self.first)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


def round_step(step: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def value_range(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The range that shows most values of every group, with a margin; never empty.

    Values far beyond the quartiles of their group are left to the edge.
    """
    cores = [_core(values) for values in groups if values]
    return widened(min(low for low, _ in cores), max(high for _, high in cores), 0.06)


def widened(low: float, high: float, share: float) -> tuple[float, float]:
    """A range with a margin of a share of its length on both sides; one without length gets one."""
    margin = share * (high - low)
    size = max(abs(low), abs(high))
    if margin <= _SMALL * size:
        margin = max(0.05 * size, _SMALL) if size else 1.0
    return low - margin, high + margin


def _core(values: Sequence[float]) -> tuple[float, float]:
    """Least and greatest of the values that are not far beyond their quartiles."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    first_quartile, last_quartile = ordered[quarter], ordered[-1 - quarter]
    reach = _FAR * (last_quartile - first_quartile) or math.inf
    return max(ordered[0], first_quartile - reach), min(ordered[-1], last_quartile + reach)


def bounds_text(axis: Axis) -> str:
    """The ends of an axis in words, for those who do not see it."""
    return f"{axis.label} from {figure(axis.first)} to {figure(axis.last)}"
