# SPDX-License-Identifier: Apache-2.0
"""Pair statistics: the ratio of two arms with its interval over repeats, and what could have been seen.

Everything is computed on the log scale, where a ratio is a difference and swapping the arms only flips a
sign. Each repeat r gives one number, D_r = median over matched steps of log(left_i / right_i). Steps inside
one run are not independent (autocorrelation, spikes), repeats are: so the interval is taken over the R
numbers D_r alone,

    theta = mean(D_r),    theta ± t(R-1, 0.975) · s / √R,    s = sample standard deviation of D_r.

This is the paired t interval of Georges, Buytaert and Eeckhout, "Statistically rigorous Java performance
evaluation", OOPSLA 2007, over interleaved repeats; the log-ratio form of Kalibera and Jones, ISMM 2013.

Few repeats know little of their own spread. Where the spread of earlier repeats of the same pair is known, it
is handed in as a prior s0 with d0 degrees of freedom, and the interval is that of the moderated t test,

    s~² = (d0 · s0² + (R-1) · s²) / (d0 + R-1),    theta ± t(d0 + R-1, 0.975) · s~ / √R

(Smyth, "Linear models and empirical Bayes methods for assessing differential expression in microarray
experiments", Statistical Applications in Genetics and Molecular Biology 3, 2004). Nothing here makes up a
prior: without one the repeats speak for themselves.
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
# What earlier repeats may weigh at most, and at least how many of them tell a spread.
MOST_DEGREES = 12.0
FEWEST_DIFFERENCES = 3
# Makes the median deviation of a normal distribution its standard deviation (Rousseeuw and Croux, JASA 1993).
ROBUST = 1.4826
_LARGEST_LOG = 700.0
# An effect so large that its size says no more.
_MUCH = 10.0

Operator = Literal["<", "<=", ">", ">="]
Movement = Literal["slower", "faster", "no"]


@dataclass(frozen=True)
class Prior:
    """What earlier repeats say of the spread.

    spread: standard deviation of D_r on the log scale (0.005 is half a percent), above 0. degrees: how many
    degrees of freedom that is worth, above 0. source: where it comes from, for people.
    """

    spread: float
    degrees: float
    source: str

    def __post_init__(self) -> None:
        """Refuse a prior that would make certain what was never measured."""
        for name, value in (("spread", self.spread), ("degrees", self.degrees)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"the {name} of a prior must be above 0, not {value:g}")


@dataclass(frozen=True)
class LogEffect:
    """Mean of the log ratios of `repeats` pairs, its interval, and the log effect seen with 80 % power.

    confidence: of the interval. method: how it was computed, in words.
    """

    theta: float
    low: float
    high: float
    repeats: int
    detectable: float
    confidence: float = CONFIDENCE
    method: str = ""

    def as_ratio(self) -> Effect:
        """The same on the ratio scale, where 1.0 is equal; `detectable` becomes a relative change."""
        return Effect(
            estimate=_ratio(self.theta),
            low=_ratio(self.low),
            high=_ratio(self.high),
            confidence=self.confidence,
            repeats=self.repeats,
            smallest_detectable=_ratio(self.detectable) - 1.0,
            method=self.method,
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


def log_effect(
    log_ratios: Sequence[float], prior: Prior | None = None, confidence: float = CONFIDENCE
) -> LogEffect:
    """Interval and smallest detectable effect of the repeats' log ratios D_r.

    prior: what is known of their spread beforehand. confidence: of the two-sided interval.
    Raises ValueError for fewer than two: one repeat says nothing about the spread.
    """
    repeats = len(log_ratios)
    if repeats < 2:
        raise ValueError("an interval needs at least two repeats")
    spread, degrees = _moderated(statistics.stdev(log_ratios), repeats - 1, prior)
    return _effect(
        statistics.fmean(log_ratios),
        spread / math.sqrt(repeats),
        degrees,
        repeats,
        confidence,
        _method(f"paired t over {repeats} repeats", prior),
    )


def log_difference(
    left: Sequence[float],
    right: Sequence[float],
    prior: Prior | None = None,
    confidence: float = CONFIDENCE,
) -> LogEffect:
    """Mean of `left` less mean of `right`, logs of runs that were not interleaved, with its interval.

    Student's two-sample t with the pooled spread of both sides, moderated where a prior of it is given:
    s · √(1/n + 1/m) with n + m - 2 degrees of freedom. Raises ValueError where there are fewer than three
    values in all, or none on one side.
    """
    if not left or not right or len(left) + len(right) < 3:
        raise ValueError("a difference needs a value on each side, and three in all")
    degrees = len(left) + len(right) - 2
    squares = sum(
        math.fsum((value - statistics.fmean(side)) ** 2 for value in side) for side in (left, right)
    )
    spread, moderated = _moderated(math.sqrt(squares / degrees), degrees, prior)
    return _effect(
        statistics.fmean(left) - statistics.fmean(right),
        spread * math.sqrt(1 / len(left) + 1 / len(right)),
        moderated,
        min(len(left), len(right)),
        confidence,
        _method(f"two-sample t of {len(left)} and {len(right)} runs", prior),
    )


def contrasts(log_ratios: Sequence[float]) -> list[float]:
    """R repeats as R-1 independent differences around zero, each with the spread of one repeat.

    Helmert's contrasts: what is left of the repeats when their mean, tonight's effect, is taken out. Those of
    many nights together are what `robust_prior` asks for.
    """
    return [
        math.sqrt(k / (k + 1)) * (log_ratios[k] - statistics.fmean(log_ratios[:k]))
        for k in range(1, len(log_ratios))
    ]


def robust_prior(differences: Sequence[float], source: str) -> Prior:
    """A prior from earlier differences of which each has the mean 0 and the spread of one D_r.

    Such are the log ratios of neighbouring runs of one case (A/A), and the `contrasts` of earlier nights. The
    spread is 1.4826 · median |d|, which one bad night does not move; n differences weigh min(12, n/2) degrees
    of freedom, because they come from other days than tonight. Raises ValueError for fewer than three, or
    where most of them are exactly 0: that is no spread to reckon with.
    """
    if len(differences) < FEWEST_DIFFERENCES:
        raise ValueError(
            f"{len(differences)} differences are too few for a prior: {FEWEST_DIFFERENCES} are the least"
        )
    spread = ROBUST * statistics.median(abs(each) for each in differences)
    return Prior(spread, min(MOST_DEGREES, len(differences) / 2), source)


def detectable_log_effect(
    spread: float, repeats: int, prior_degrees: float = 0.0, confidence: float = CONFIDENCE
) -> float:
    """Smallest log effect that `repeats` pairs of this spread show with 80 % power.

    (t(d0 + R-1, 0.975) + t(d0 + R-1, 0.8)) · s / √R: the first quantile is the test's, the second the
    power's. spread: with a prior the moderated one, of whose degrees of freedom d0 are the prior's.
    """
    return _detectable(spread / math.sqrt(repeats), prior_degrees + repeats - 1, confidence)


def detectable_text(effect: float) -> str:
    """A smallest detectable effect (0.02 is 2 %) in words; one so large that its size says no more is cut."""
    share = f"{100 * effect:.1f} %" if effect < _MUCH else f"above {100 * _MUCH:.0f} %"
    return f"smallest detectable effect {share}"


def moved(effect: Effect, minimum: float) -> Movement:
    """Whether a ratio of times is clearly away from 1 and by `minimum` (0.005 is half a percent) at least.

    Clearly: the whole interval lies on one side of 1. A difference that is certain but smaller than the
    minimum is none that anybody should be woken for.
    """
    if effect.low > 1.0 and effect.estimate >= 1.0 + minimum:
        return "slower"
    if effect.high < 1.0 and effect.estimate <= 1.0 / (1.0 + minimum):
        return "faster"
    return "no"


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


def _moderated(spread: float, degrees: int, prior: Prior | None) -> tuple[float, float]:
    """Spread and degrees of freedom after the prior's are mixed in."""
    if prior is None:
        return spread, degrees
    together = prior.degrees + degrees
    return math.sqrt((prior.degrees * prior.spread**2 + degrees * spread**2) / together), together


def _effect(
    theta: float, error: float, degrees: float, repeats: int, confidence: float, method: str
) -> LogEffect:
    half_width = t_quantile(0.5 + confidence / 2, degrees) * error
    return LogEffect(
        theta=theta,
        low=theta - half_width,
        high=theta + half_width,
        repeats=repeats,
        detectable=_detectable(error, degrees, confidence),
        confidence=confidence,
        method=method,
    )


def _detectable(error: float, degrees: float, confidence: float) -> float:
    return (t_quantile(0.5 + confidence / 2, degrees) + t_quantile(POWER, degrees)) * error


def _method(plain: str, prior: Prior | None) -> str:
    if prior is None:
        return plain
    return (
        f"moderated {plain}, prior spread {100 * prior.spread:.2g} % worth {prior.degrees:g} degrees of "
        f"freedom ({prior.source})"
    )


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


def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t; the degrees of freedom need not be whole."""
    # The inverse of Student's t alone: importing scipy.stats for it would take a second.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))
