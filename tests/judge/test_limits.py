# SPDX-License-Identifier: Apache-2.0
"""Limits from noise, against the formula worked by hand and scipy's t distribution."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy import stats

from lora_suite.judge.limits import FEWEST_STEPS, Unsteady, drift, propose_limit


def effect(values: list[float]) -> float:
    """The smallest effect of one new run, with scipy.stats (the code inverts t by scipy.special)."""
    count = len(values)
    spread = statistics.stdev(math.log(value) for value in values)
    quantiles = stats.t.ppf(0.975, count - 1) + stats.t.ppf(0.8, count - 1)
    return math.exp(quantiles * spread * math.sqrt(1 + 1 / count)) - 1


def test_a_quiet_machine_gets_five_percent():
    limit = propose_limit([10.0, 10.01, 9.99, 10.0, 10.02], "<")
    assert (limit.median, limit.repeats, limit.margin) == (10.0, 5, 0.05)
    assert limit.spread == pytest.approx(1.4826 * 0.01)
    assert limit.value == 10.5


def test_three_spreads_decide_where_they_are_largest():
    """Deviations 0.2, 0.2, 0.25, 0.25 of 10: the median one is 0.2, 3 · 1.4826 · 0.2 / 10 = 8.9 %."""
    values = [9.75, 9.8, 10.0, 10.2, 10.25] * 4
    limit = propose_limit(values, "<")
    assert limit.margin == pytest.approx(3 * 1.4826 * 0.2 / 10)
    assert limit.margin > effect(values)
    assert limit.value == 10.9


def test_what_cannot_be_resolved_is_not_judged():
    """One odd run among five moves no median, but says how far a run can be off."""
    values = [10.0, 10.01, 10.0, 9.99, 10.8]
    limit = propose_limit(values, "<")
    assert limit.resolvable == pytest.approx(effect(values))
    assert limit.margin == limit.resolvable > 0.1


def test_few_runs_make_a_wide_limit():
    quiet = [1.0, 1.01, 0.99]
    assert propose_limit(quiet * 3, "<").margin < propose_limit(quiet, "<").margin


@pytest.mark.parametrize(
    ("operator", "level", "expected"),
    [
        ("<", 1.0, 1.05),
        ("<=", 123.4, 130.0),  # 129.57
        (">", 1.0, 0.952),  # 0.95238
        (">=", 123.4, 117.0),  # 117.52
        ("<", 0.0123, 0.013),  # 0.012915
        ("<", 98765.0, 104000.0),  # 103703.25
        ("<", 2.0, 2.1),
    ],
)
def test_three_digits_away_from_the_runs(operator, level, expected):
    assert propose_limit([level] * 5, operator).value == expected


@pytest.mark.parametrize("operator", ["<", ">"])
def test_a_proposed_limit_passes_the_runs_it_came_from(operator):
    values = [10.0, 10.3, 9.8, 10.1, 9.9]
    limit = propose_limit(values, operator).value
    assert all(value < limit if operator == "<" else value > limit for value in values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 1.0], "2 runs are too few for a spread: 3 are the least"),
        ([1.0, 1.0, 0.0], "value 0: a margin needs positive values"),
        ([1.0, 1.0, math.nan], "value nan"),
        ([1.0, 1.2, 0.8], "3 runs from 0.8 to 1.2 need a margin of .* more than 25 %"),
        ([1.0, 1.0, 1.0, 1.0, 2.0], "need a margin of"),
    ],
)
def test_what_allows_no_limit(values, message):
    with pytest.raises(Unsteady, match=message):
        propose_limit(values, "<")


def test_drift_compares_the_ends():
    assert drift([1.0] * 9) == 0.0
    # The first third is 1, the last 1.2; the middle counts for nothing.
    assert drift([1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 1.2, 1.2, 1.2]) == pytest.approx(0.2)
    assert drift([2.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.5, 0.5, 0.5]) == pytest.approx(-0.5)


def test_drift_needs_steps():
    drift([1.0] * FEWEST_STEPS)
    with pytest.raises(Unsteady, match="5 steps after warm-up are too few"):
        drift([1.0] * (FEWEST_STEPS - 1))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_drift_needs_times(value):
    with pytest.raises(Unsteady, match="which no step can"):
        drift([value] * FEWEST_STEPS)
