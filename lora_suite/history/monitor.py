# SPDX-License-Identifier: Apache-2.0
"""Night by night: does tonight's value belong to what was accepted so far?

Two tests on log values, both against *accepted* nights alone. A night is accepted unless the chart calls it
odd or a drift is open, so that a slow creep never becomes its own reference.

Control chart (one night that is far off): with the median m of the last 28 accepted nights, K of them, and
the spread s with its degrees of freedom,

    z = (x - m) / (s · sqrt(1 + 1/K)),   alert where |z| > 4 and |x - m| is at least the smallest change.

s has few degrees of freedom while a history is young, so z is first taken from Student's t to the normal
scale: z' = sqrt(d · log(1 + z²/d)) · (8d + 1)/(8d + 3) (Wallace, Annals of Mathematical Statistics 30, 1959).

CUSUM (many nights that are a little off; Page, Biometrika 41, 1954): with the mean c of the segment's first
accepted nights, at most 30 of n, which then stays as it is,

    u = (x - c) / (s · f · sqrt(1 + 1/n)), at most 4 either way,   S = max(0, S + u - k),

and the same downwards; alert where S > h and the last five nights lie off by at least the larger of the
smallest change and 2.25 spreads. Nights are not independent: f = sqrt((1 + r)/(1 - r)) turns their spread
into that of a mean of many with autocorrelation r (Johnson and Bagshaw, Technometrics 16, 1974). r is taken
as at least 0.3, and as more where the accepted nights show more. The first bad night is, of those since S was
last 0, the night j from which on the deviations d from c stand out most: the largest (d_j + … + d_t)² /
(t-j+1), the likelihood of a step whose size is not known. The choice of k and h, and what they do to false
alarms and delay, is in docs/history.md.

An improvement that five nights and the CUSUM confirm becomes the reference by itself, a regression never.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lora_suite.history.metrics import Policy

FEWEST_NIGHTS = 10
FEWEST_AFTER_CHANGE = 5
CHART_NIGHTS = 28
CHART_LIMIT = 4.0
ALLOWANCE = 0.85
THRESHOLD = 8.0
AUTOCORRELATION = 0.3

_REFERENCE_NIGHTS = 30
_SPREAD_NIGHTS = 60
_LARGEST_STEP = 4.0
_LARGEST_SUM = 1.5 * THRESHOLD
_RECENT = 5
_FLOOR_SPREADS = 2.25
_LARGEST_AUTOCORRELATION = 0.8
_PRIOR_NIGHTS = 30
_ROBUST = 1.4826
_CLIP = 3.0

Detector = Literal["chart", "cusum"]


@dataclass(frozen=True)
class Signal:
    """What one night gave rise to.

    detector: which test. first: index of the first night of the new level. change: relative to the accepted
    level (0.02 is 2 % more). score: z' of the chart, S of the CUSUM. worse: whether the metric's policy calls
    that worse.
    """

    detector: Detector
    first: int
    change: float
    score: float
    worse: bool


@dataclass(frozen=True)
class Watched:
    """The monitor's answer for each night of a series, in order.

    signals: None where nothing was found. judged: whether there were accepted nights enough to judge by.
    accepted: improvements (index of the first better night) that became the reference by themselves.
    """

    signals: list[Signal | None]
    judged: list[bool]
    accepted: list[int]


def watch(
    values: Sequence[float],
    policy: Policy,
    starts: Collection[int] = (),
    dismissed: Mapping[int, int] | None = None,
) -> Watched:
    """Run both tests over a series as they would have run, a night after the other; each sees only its past.

    values: positive, oldest first. starts: indices at which a change was acknowledged and a new level begins.
    dismissed: nights that were acknowledged as noise, last index by first: accepted without a judgement.
    """
    monitor = _Monitor(policy)
    spans = dict(dismissed or {})
    signals: list[Signal | None] = []
    judged = []
    noise_until = -1
    for index, value in enumerate(values):
        if index in starts:
            monitor.begin_segment()
        noise_until = max(noise_until, spans.get(index, -1))
        log = math.log(value)
        if index <= noise_until:
            monitor.accept_unseen(log)
            signals.append(None)
            judged.append(False)
            continue
        judged.append(monitor.ready)
        signals.append(monitor.see(index, log))
    return Watched(signals, judged, monitor.improved)


@dataclass
class _Drift:
    """One side of the CUSUM: its sum, and the night after which it was last zero."""

    sign: int
    total: float = 0.0
    first: int = 0
    alarmed: bool = False

    def add(self, index: int, step: float) -> None:
        if self.total == 0.0:
            self.first = index
            self.alarmed = False
        self.total = min(max(0.0, self.total + self.sign * step - ALLOWANCE), _LARGEST_SUM)


@dataclass(frozen=True)
class _Night:
    """A night that is not accepted yet. odd: the chart called it so."""

    index: int
    value: float
    odd: bool = False


@dataclass
class _Monitor:
    """The state between two nights, all of it in log values."""

    policy: Policy
    accepted: list[float] = field(default_factory=list)
    earlier: list[float] = field(default_factory=list)
    pending: list[_Night] = field(default_factory=list)
    up: _Drift = field(default_factory=lambda: _Drift(1))
    down: _Drift = field(default_factory=lambda: _Drift(-1))
    recent: list[float] = field(default_factory=list)
    improved: list[int] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether enough nights are accepted to judge the next one: fewer, where the spread is known."""
        known = len(self.earlier) >= FEWEST_NIGHTS
        return len(self.accepted) >= (FEWEST_AFTER_CHANGE if known else FEWEST_NIGHTS)

    def begin_segment(self) -> None:
        """A new level begins: its centre is unknown, its spread is that of the levels before."""
        self.earlier = self._residuals()[-_SPREAD_NIGHTS:]
        self.accepted = []
        self.pending = []
        self.recent = []
        self._reset()

    def accept_unseen(self, value: float) -> None:
        """Take a night as it is: somebody said that it is noise."""
        self.accepted.append(value)
        self.pending = []
        self.recent = []
        self._reset()

    def see(self, index: int, value: float) -> Signal | None:
        """Judge one night, then accept it, or keep it waiting while a drift is open."""
        if not self.ready:
            self.accepted.append(value)
            return None
        spread, degrees = self._spread()
        self.recent = [*self.recent, value][-_RECENT:]
        odd = self._chart(index, value, spread, degrees)
        self.pending.append(_Night(index, value, odd is not None))
        drift = self._cusum(index, value, spread)
        self._settle(index)
        if drift is not None and not drift.worse and index - drift.first + 1 >= _RECENT:
            self._take_improvement(drift.first)
        return drift or odd

    def _chart(self, index: int, value: float, spread: float, degrees: int) -> Signal | None:
        nights = self.accepted[-CHART_NIGHTS:]
        effect = value - statistics.median(nights)
        z = normal_score(effect / (spread * math.sqrt(1 + 1 / len(nights))), degrees)
        if abs(z) <= CHART_LIMIT or abs(effect) < self.policy.smallest:
            return None
        return Signal("chart", index, math.expm1(effect), z, self._is_worse(effect))

    def _cusum(self, index: int, value: float, spread: float) -> Signal | None:
        if len(self.accepted) < FEWEST_NIGHTS:
            return None
        reference = self.accepted[:_REFERENCE_NIGHTS]
        centre = math.fsum(reference) / len(reference)
        unit = spread * self._inflation() * math.sqrt(1 + 1 / len(reference))
        step = max(-_LARGEST_STEP, min((value - centre) / unit, _LARGEST_STEP))
        floor = max(self.policy.smallest, _FLOOR_SPREADS * spread)
        for side in (self.up, self.down):
            side.add(index, step)
            since = self.recent[-min(_RECENT, index - side.first + 1) :]
            effect = math.fsum(since) / len(since) - centre
            if side.total > THRESHOLD:
                side.alarmed = True
                if side.sign * effect >= floor:
                    first = self._first_off(side.first, centre)
                    change = math.expm1(effect)
                    return Signal("cusum", first, change, side.total, self._is_worse(effect))
        return None

    def _first_off(self, since: int, centre: float) -> int:
        """Index of the night from which on the waiting nights stand out most from the centre."""
        total, best, first = 0.0, -1.0, since
        for count, night in enumerate(reversed(self.pending), start=1):
            if night.index < since:
                break
            total += night.value - centre
            if total * total / count > best:
                best, first = total * total / count, night.index
        return first

    def _settle(self, index: int) -> None:
        """Accept what no open drift holds back, less odd nights and those of an alarm that went away."""
        sides = (self.up, self.down)
        if any(side.alarmed and side.total > 0.0 for side in sides):
            return
        held = min((side.first for side in sides if side.total > 0.0), default=index + 1)
        if not any(side.alarmed for side in sides):
            self.accepted += [each.value for each in self.pending if each.index < held and not each.odd]
        self.pending = [each for each in self.pending if each.index >= held]

    def _take_improvement(self, first: int) -> None:
        better = [each.value for each in self.pending if each.index >= first]
        self.improved.append(first)
        self.begin_segment()
        self.accepted = better

    def _spread(self) -> tuple[float, int]:
        """Standard deviation of a night around its level, and its degrees of freedom."""
        residuals = [*self.earlier, *self._residuals()][-_SPREAD_NIGHTS:]
        limit = _CLIP * max(_ROBUST * statistics.median(map(abs, residuals)), self.policy.spread)
        squares = math.fsum(min(abs(each), limit) ** 2 for each in residuals)
        degrees = len(residuals) - 1
        return max(math.sqrt(squares / degrees), self.policy.spread), degrees

    def _residuals(self) -> list[float]:
        nights = self.accepted[-_SPREAD_NIGHTS:]
        if not nights:
            return []
        centre = math.fsum(nights) / len(nights)
        return [value - centre for value in nights]

    def _inflation(self) -> float:
        r = self._autocorrelation()
        return math.sqrt((1 + r) / (1 - r))

    def _autocorrelation(self) -> float:
        residuals = self._residuals()
        squares = math.fsum(each * each for each in residuals)
        products = math.fsum(a * b for a, b in itertools.pairwise(residuals))
        seen = products / squares if squares > 0 else 0.0
        nights = len(residuals)
        shrunk = (nights * seen + _PRIOR_NIGHTS * AUTOCORRELATION) / (nights + _PRIOR_NIGHTS)
        return min(max(shrunk, AUTOCORRELATION), _LARGEST_AUTOCORRELATION)

    def _is_worse(self, effect: float) -> bool:
        return self.policy.worse == 0 or effect * self.policy.worse > 0

    def _reset(self) -> None:
        self.up = _Drift(1)
        self.down = _Drift(-1)


def normal_score(t: float, degrees: int) -> float:
    """The normal deviate that is as rare as `t` of Student's distribution (Wallace 1959; within 2 %)."""
    scale = (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(scale * math.sqrt(degrees * math.log1p(t * t / degrees)), t)
