# SPDX-License-Identifier: Apache-2.0
"""Pair statistics: the ratio of two arms with its interval over repeats, and what could have been seen.

Everything is computed on the log scale, where a ratio is a difference and swapping the arms only flips a
sign. Each repeat r gives one number, D_r = median over matched steps of log(left_i / right_i). Steps inside
one run are not independent (autocorrelation, spikes), repeats are: so the interval is taken over the R
numbers D_r alone,

    theta = mean(D_r),    theta ± t(R-1, 0.975) · s / √R,    s = sample standard deviation of D_r.

This is the paired t interval of Georges, Buytaert and Eeckhout, "Statistically rigorous Java performance
evaluation", OOPSLA 2007, over interleaved repeats; the log-ratio form of Kalibera and Jones, ISMM 2013.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lora_suite.judge.verdict import Effect, State

CONFIDENCE = 0.95
POWER = 0.80
_LARGEST_LOG = 700.0

Operator = Literal["<", "<=", ">", ">="]


@dataclass(frozen=True)
class LogEffect:
    """Mean of the log ratios of `repeats` pairs, its interval, and the log effect seen with 80 % power."""

    theta: float
    low: float
    high: float
    repeats: int
    detectable: float

    def as_ratio(self) -> Effect:
        """The same on the ratio scale, where 1.0 is equal; `detectable` becomes a relative change."""
        return Effect(
            estimate=_ratio(self.theta),
            low=_ratio(self.low),
            high=_ratio(self.high),
            confidence=CONFIDENCE,
            repeats=self.repeats,
            smallest_detectable=_ratio(self.detectable) - 1.0,
        )


def median_log_ratio(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """D_r of one repeat: the median over steps of log(left / right).

    left, right: positive values by step, over the same steps, at least one.
    Raises ValueError where the steps differ, there are none, or a value is not positive and finite.
    """
    if left.keys() != right.keys():
        raise ValueError("the arms have different steps")
    if not left:
        raise ValueError("no steps to compare")
    for values in (left, right):
        for step, value in values.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"step {step} is {value:g}: a ratio needs positive values")
    return statistics.median(math.log(left[step] / right[step]) for step in left)


def log_effect(log_ratios: Sequence[float]) -> LogEffect:
    """Interval and smallest detectable effect of the repeats' log ratios D_r.

    Raises ValueError for fewer than two: one repeat says nothing about the spread.
    """
    repeats = len(log_ratios)
    if repeats < 2:
        raise ValueError("an interval needs at least two repeats")
    theta = statistics.fmean(log_ratios)
    error = statistics.stdev(log_ratios) / math.sqrt(repeats)
    half_width = _t_quantile(0.5 + CONFIDENCE / 2, repeats - 1) * error
    return LogEffect(
        theta=theta,
        low=theta - half_width,
        high=theta + half_width,
        repeats=repeats,
        detectable=detectable_log_effect(error * math.sqrt(repeats), repeats),
    )


def detectable_log_effect(spread: float, repeats: int) -> float:
    """Smallest log effect that `repeats` pairs of this spread show with 80 % power at two-sided 5 %.

    (t(R-1, 0.975) + t(R-1, 0.8)) · s / √R: the first quantile is the test's, the second the power's.
    """
    degrees = repeats - 1
    quantiles = _t_quantile(0.5 + CONFIDENCE / 2, degrees) + _t_quantile(POWER, degrees)
    return quantiles * spread / math.sqrt(repeats)


def decide(effect: Effect, operator: Operator, limit: float) -> State:
    """PASS where the whole interval satisfies `ratio operator limit`, FAIL where none of it does.

    Anything between is INCONCLUSIVE: the data allow both answers.
    """
    low_holds, high_holds = (_holds(bound, operator, limit) for bound in (effect.low, effect.high))
    if low_holds and high_holds:
        return "PASS"
    if not low_holds and not high_holds:
        return "FAIL"
    return "INCONCLUSIVE"


def _ratio(log: float) -> float:
    # Two repeats that disagree wildly reach beyond the floating-point numbers; JSON has no infinity.
    return math.exp(min(log, _LARGEST_LOG))


def _holds(value: float, operator: Operator, limit: float) -> bool:
    if operator == "<":
        return value < limit
    if operator == "<=":
        return value <= limit
    if operator == ">":
        return value > limit
    return value >= limit


def _t_quantile(probability: float, degrees: int) -> float:
    # The inverse of Student's t alone: importing scipy.stats for it would take a second.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))
