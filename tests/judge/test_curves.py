# SPDX-License-Identifier: Apache-2.0
"""Loss curves: exact, drift, apart; and levels of other seeds against scipy's t test."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy import stats

from lora_suite.judge.curves import compare_curves, compare_levels

CURVE = {step: 1.5 + 2.0 * math.exp(-step / 15) for step in range(1, 51)}


def changed(**by_step: float) -> dict[int, float]:
    """The curve with some steps changed by a share."""
    shares = {int(step.lstrip("_")): share for step, share in by_step.items()}
    return {step: value * (1 + shares.get(step, 0.0)) for step, value in CURVE.items()}


class TestSteps:
    """Curves of the same batches."""

    def test_equal_curves_are_exact(self):
        found = compare_curves(dict(CURVE), CURVE)
        assert (found.tier, found.state, found.message) == ("exact", "PASS", "equal at all of 50 steps")

    def test_the_last_digit_is_drift(self):
        found = compare_curves(CURVE | {7: math.nextafter(CURVE[7], 9)}, CURVE)
        assert (found.tier, found.state, found.at_step) == ("drift", "PASS", 7)

    @pytest.mark.parametrize(("share", "tier"), [(1.9e-3, "drift"), (2.1e-3, "apart"), (-2.1e-3, "apart")])
    def test_the_largest_difference(self, share, tier):
        found = compare_curves(changed(_30=share), CURVE)
        assert (found.tier, found.at_step) == (tier, 30)
        assert found.largest == pytest.approx(abs(share))
        assert found.offset == pytest.approx(share / 50)

    @pytest.mark.parametrize(("offset", "tier"), [(4.9e-4, "drift"), (5.1e-4, "apart"), (-5.1e-4, "apart")])
    def test_a_steady_offset(self, offset, tier):
        found = compare_curves({step: value * (1 + offset) for step, value in CURVE.items()}, CURVE)
        assert (found.tier, found.state) == (tier, "FAIL" if tier == "apart" else "PASS")
        assert "limit 0.0005" in found.message

    def test_jitter_of_the_same_size_is_drift(self):
        jitter = {step: value * (1 + 1.9e-3 * (-1) ** step) for step, value in CURVE.items()}
        assert compare_curves(jitter, CURVE).tier == "drift"

    @pytest.mark.parametrize(
        ("new", "reference", "words"),
        [
            ({1: 1.0, 2: 1.0}, {1: 1.0}, "only one curve has step 2"),
            ({1: 1.0}, {1: 1.0, 2: 1.0}, "only one curve has step 2"),
            ({}, {}, "empty"),
            ({1: math.nan}, {1: math.nan}, "not finite at step 1"),
            ({1: 1.0}, {1: math.inf}, "not finite at step 1"),
            ({1: 1.0, 2: 1.0}, {1: 1.0, 2: 0.0}, "the reference is 0 at step 2"),
        ],
    )
    def test_what_cannot_be_compared_is_apart(self, new, reference, words):
        found = compare_curves(new, reference)
        assert (found.tier, found.state, found.largest) == ("apart", "FAIL", None)
        assert words in found.message

    def test_two_curves_of_zeros_are_equal(self):
        assert compare_curves({1: 0.0}, {1: 0.0}).tier == "exact"


def seeds(count: int, level: float, seed: int, spread: float = 0.003) -> list[dict[int, float]]:
    """Curves of several seeds around a level."""
    generator = random.Random(seed)
    levels = [level * (1 + generator.gauss(0, spread)) for _ in range(count)]
    return [{step: each * (1 + generator.gauss(0, 0.01)) for step in range(1, 41)} for each in levels]


class TestLevels:
    """Curves of other seeds."""

    def test_it_is_scipys_t_test_on_the_last_twenty_steps(self):
        new, reference = seeds(4, 1.02, 1), seeds(6, 1.0, 2)
        found = compare_levels(new, reference).effect
        logs = [
            [math.log(statistics.fmean(list(curve.values())[-20:])) for curve in curves]
            for curves in (new, reference)
        ]
        theirs = stats.ttest_ind(*logs).confidence_interval(0.95)
        assert found is not None
        assert (found.low, found.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)))

    @pytest.mark.parametrize(("level", "state"), [(1.0, "PASS"), (1.05, "FAIL"), (0.95, "FAIL")])
    def test_state(self, level, state):
        found = compare_levels(seeds(5, level, 3), seeds(5, 1.0, 4))
        assert found.state == state
        assert "mean of the last 20 steps" in found.message

    def test_too_much_scatter_is_inconclusive(self):
        found = compare_levels(seeds(5, 1.0, 5, spread=0.05), seeds(5, 1.0, 6, spread=0.05))
        assert found.state == "INCONCLUSIVE"
        assert "1 % could not be seen" in found.message

    def test_too_few_curves_are_inconclusive(self):
        assert compare_levels(seeds(1, 1.0, 7), seeds(4, 1.0, 8)).state == "INCONCLUSIVE"
        assert compare_levels([], seeds(5, 1.0, 8)).state == "INCONCLUSIVE"

    @pytest.mark.parametrize(
        ("curve", "words"),
        [
            (dict.fromkeys(range(19), 1.0), "19 steps has no level"),
            (dict.fromkeys(range(20), math.nan), "is nan"),
            (dict.fromkeys(range(20), -1.0), "is -1"),
        ],
    )
    def test_a_curve_without_a_level_fails(self, curve, words):
        found = compare_levels([curve], seeds(5, 1.0, 9))
        assert (found.state, found.effect) == ("FAIL", None)
        assert words in found.message
