# SPDX-License-Identifier: Apache-2.0
"""Pair statistics against textbook tables, hand computation, simulation and scipy's own t test."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lora_suite.judge.statistics import (
    LogEffect,
    Prior,
    contrasts,
    decide,
    detectable_log_effect,
    detectable_text,
    log_difference,
    log_effect,
    median_log_ratio,
    moved,
    robust_prior,
)
from lora_suite.judge.verdict import Effect

DATA = Path(os.environ.get("LORA_SUITE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
GEMMA = DATA / "automodel_gemma3n_pair"


def series(*values: float) -> dict[int, float]:
    """Values by step, from step 1."""
    return dict(enumerate(values, 1))


class TestMedianLogRatio:
    """D of one repeat."""

    def test_it_is_the_median_of_the_matched_ratios(self):
        # Ratios 2, 0.5, 4: their median is 2, while the ratio of the medians 3 and 1 would be 3.
        assert median_log_ratio(series(2, 3, 4), series(1, 6, 1)) == pytest.approx(math.log(2))

    def test_batch_content_cancels(self):
        content = [1.0, 7.0, 2.0, 40.0]
        ours = series(*(1.03 * each for each in content))
        assert median_log_ratio(ours, series(*content)) == pytest.approx(math.log(1.03))

    def test_swapping_the_arms_flips_the_sign(self):
        left, right = series(1.0, 2.5, 3.0), series(2.0, 1.0, 7.0)
        assert median_log_ratio(left, right) == pytest.approx(-median_log_ratio(right, left))

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    def test_a_value_that_has_no_logarithm_is_refused(self, bad):
        with pytest.raises(ValueError, match="step 2 is"):
            median_log_ratio(series(1.0, bad), series(1.0, 1.0))
        with pytest.raises(ValueError, match="step 2 is"):
            median_log_ratio(series(1.0, 1.0), series(1.0, bad))

    def test_unmatched_steps_are_refused(self):
        with pytest.raises(ValueError, match="different steps"):
            median_log_ratio(series(1.0), series(1.0, 1.0))

    def test_no_steps_are_refused(self):
        with pytest.raises(ValueError, match="no steps"):
            median_log_ratio({}, {})


class TestInterval:
    """theta ± t · s / √R."""

    def test_by_hand(self):
        # mean 0.03, s = √((0.02² + 0 + 0.02²) / 2) = 0.02; t(2, 0.975) = 4.302653 (any printed table).
        effect = log_effect([0.01, 0.03, 0.05])
        half = 4.302653 * 0.02 / math.sqrt(3)
        assert effect.theta == pytest.approx(0.03)
        assert (effect.low, effect.high) == pytest.approx((0.03 - half, 0.03 + half), abs=1e-7)
        assert effect.repeats == 3

    @pytest.mark.parametrize(("repeats", "quantile"), [(2, 12.706205), (4, 3.182446), (8, 2.364624)])
    def test_the_quantile_is_students(self, repeats, quantile):
        log_ratios = [0.01 * (-1) ** index for index in range(repeats)]
        s = 0.01 * math.sqrt(repeats / (repeats - 1))
        assert log_effect(log_ratios).high == pytest.approx(quantile * s / math.sqrt(repeats), rel=1e-6)

    @given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
    def test_it_is_the_one_sample_t_interval_of_scipy(self, log_ratios):
        if numpy.ptp(log_ratios) < 1e-6:
            return
        effect = log_effect(log_ratios)
        theirs = stats.ttest_1samp(log_ratios, 0.0).confidence_interval(0.95)
        assert (effect.low, effect.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6, abs=1e-9)

    def test_repeats_that_agree_exactly_have_no_width(self):
        effect = log_effect([0.25, 0.25])
        assert (effect.low, effect.theta, effect.high, effect.detectable) == (0.25, 0.25, 0.25, 0.0)

    @pytest.mark.parametrize("log_ratios", [[], [0.1]])
    def test_one_repeat_has_no_interval(self, log_ratios):
        with pytest.raises(ValueError, match="two repeats"):
            log_effect(log_ratios)

    def test_it_covers_the_truth_as_often_as_it_says(self):
        generator = random.Random(20260301)
        covered = 0
        for _ in range(2000):
            effect = log_effect([generator.gauss(0.02, 0.01) for _ in range(4)])
            covered += effect.low <= 0.02 <= effect.high
        # 95 % ± 4 standard errors of a share over 2,000 draws.
        assert abs(covered / 2000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)

    def test_repeats_that_disagree_wildly_still_give_numbers(self):
        effect = log_effect([0.0, 500.0]).as_ratio()
        assert all(map(math.isfinite, (effect.low, effect.estimate, effect.high)))
        assert effect.smallest_detectable is not None
        assert decide(effect, "<", 2.0) == "INCONCLUSIVE"

    def test_as_a_ratio(self):
        effect = LogEffect(theta=math.log(2), low=0.0, high=math.log(4), repeats=4, detectable=math.log(1.5))
        ratio = effect.as_ratio()
        assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((2.0, 1.0, 4.0))
        assert ratio.smallest_detectable == pytest.approx(0.5)
        assert (ratio.confidence, ratio.repeats) == (0.95, 4)


class TestDetectable:
    """(t(0.975) + t(0.8)) · s / √R, in percent for a spread of 1 %, worked out with t tables."""

    @pytest.mark.parametrize(("repeats", "percent"), [(2, 9.96), (3, 3.10), (4, 2.08), (5, 1.66), (8, 1.15)])
    @pytest.mark.parametrize("spread", [0.001, 0.005, 0.01, 0.04])
    def test_table(self, repeats, percent, spread):
        expected = percent / 100 * (spread / 0.01)
        assert detectable_log_effect(spread, repeats) == pytest.approx(expected, rel=0.005)

    def test_by_hand(self):
        # t(3, 0.975) = 3.182446, t(3, 0.8) = 0.978472, √4 = 2.
        assert detectable_log_effect(0.01, 4) == pytest.approx((3.182446 + 0.978472) * 0.01 / 2, rel=1e-6)

    def test_an_effect_of_that_size_is_seen_about_four_times_in_five(self):
        """The noncentral t gives the test's true power at the effect that the formula names: near 80 %."""
        for repeats in (4, 8, 16):
            shift = detectable_log_effect(1.0, repeats) * math.sqrt(repeats)
            critical = stats.t.ppf(0.975, repeats - 1)
            power = 1 - stats.nct.cdf(critical, repeats - 1, shift)
            assert 0.76 < power < 0.84


def interval(low: float, high: float) -> Effect:
    """An effect of which only the interval matters."""
    return Effect(
        estimate=(low + high) / 2, low=low, high=high, confidence=0.95, repeats=4, smallest_detectable=0.01
    )


@pytest.mark.parametrize(
    ("low", "high", "operator", "state"),
    [
        (0.7, 0.79, "<", "PASS"),
        (0.81, 0.9, "<", "FAIL"),
        (0.79, 0.81, "<", "INCONCLUSIVE"),
        (0.7, 0.8, "<", "INCONCLUSIVE"),
        (0.7, 0.8, "<=", "PASS"),
        (0.8, 0.9, "<", "FAIL"),
        (0.8, 0.9, "<=", "INCONCLUSIVE"),
        (0.81, 0.9, ">", "PASS"),
        (0.7, 0.79, ">", "FAIL"),
        (0.79, 0.81, ">", "INCONCLUSIVE"),
        (0.8, 0.9, ">=", "PASS"),
        (0.8, 0.9, ">", "INCONCLUSIVE"),
        (0.7, 0.8, ">", "FAIL"),
        (0.8, 0.8, "<", "FAIL"),
        (0.8, 0.8, "<=", "PASS"),
    ],
)
def test_the_whole_interval_decides(low, high, operator, state):
    assert decide(interval(low, high), operator, 0.8) == state


@pytest.mark.parametrize(
    ("effect", "text"),
    [(0.0143, "1.4 %"), (9.99, "999.0 %"), (10.0, "above 1000 %"), (1573.079, "above 1000 %")],
)
def test_an_effect_whose_size_says_no_more_is_cut(effect, text):
    assert detectable_text(effect) == f"smallest detectable effect {text}"


@pytest.mark.skipif(not GEMMA.is_dir(), reason="real metric series are not here")
class TestRealPair:
    """A published pair (NVIDIA-NeMo/Automodel golden values): identical batches, LoRA slower."""

    def arm(self, name: str, metric: str) -> dict[int, float]:
        """One series of one arm, from step 4 on."""
        values = json.loads((GEMMA / f"{name}.json").read_text())[metric]
        return {int(step): value for step, value in values.items() if int(step) > 3}

    def test_lora_is_slower_by_3_to_4_5_percent(self):
        name = "timing/train/total_step_time"
        slower = math.expm1(median_log_ratio(self.arm("lora", name), self.arm("full", name)))
        assert 0.03 < slower < 0.045

    def test_the_batches_are_the_same(self):
        assert self.arm("lora", "train/tokens") == self.arm("full", "train/tokens")

    def test_matching_takes_the_batches_out_of_the_noise(self):
        """Unmatched, the steps scatter by batch length; matched, what is left is the arms' difference."""
        full, lora = (self.arm(arm, "timing/train/total_step_time") for arm in ("full", "lora"))
        matched = [math.log(lora[step] / full[step]) for step in full]
        unmatched = [math.log(lora[step] / full[step + 1]) for step in full if step + 1 in full]
        spread = [numpy.subtract(*numpy.percentile(each, [75, 25])) for each in (matched, unmatched)]
        assert spread[0] < spread[1] / 3


class TestPrior:
    """The moderated t: what earlier repeats say of the spread is mixed in, and nothing is made up."""

    def test_by_hand(self):
        # R = 3, s = 0.02; prior 0.01 worth 6: s~² = (6 · 0.0001 + 2 · 0.0004) / 8 = 0.000175, t(8, 0.975).
        effect = log_effect([0.01, 0.03, 0.05], Prior(0.01, 6.0, "20 nights"))
        spread = math.sqrt(0.000175)
        half = 2.306004 * spread / math.sqrt(3)
        assert (effect.low, effect.high) == pytest.approx((0.03 - half, 0.03 + half), abs=1e-7)
        # t(8, 0.8) = 0.888890
        assert effect.detectable == pytest.approx((2.306004 + 0.888890) * spread / math.sqrt(3), rel=1e-6)
        assert effect.detectable == pytest.approx(detectable_log_effect(spread, 3, prior_degrees=6.0))
        assert effect.method == (
            "moderated paired t over 3 repeats, prior spread 1 % worth 6 degrees of freedom (20 nights)"
        )

    def test_a_prior_that_says_the_same_narrows_the_interval(self):
        log_ratios = [0.01, 0.03, 0.05]
        alone, informed = log_effect(log_ratios), log_effect(log_ratios, Prior(0.02, 12.0, "x"))
        assert alone.theta == informed.theta
        assert informed.high - informed.low < alone.high - alone.low

    def test_repeats_that_agree_by_chance_do_not_make_certain(self):
        effect = log_effect([0.01, 0.01], Prior(0.01, 12.0, "x"))
        # s~² = 12 / 13 · 0.0001; t(13, 0.975) = 2.160369
        assert effect.high - effect.theta == pytest.approx(
            2.160369 * math.sqrt(12 / 13) * 0.01 / math.sqrt(2)
        )

    @pytest.mark.parametrize(("spread", "degrees"), [(0.0, 4.0), (-1.0, 4.0), (0.1, 0.0), (math.nan, 1.0)])
    def test_a_prior_without_spread_or_weight_is_refused(self, spread, degrees):
        with pytest.raises(ValueError, match="prior must be above 0"):
            Prior(spread, degrees, "x")

    def test_from_earlier_differences(self):
        # Median of 1, 2, 3, 4, 100 in percent is 3: one bad night moves nothing.
        prior = robust_prior([0.01, -0.02, 0.03, -0.04, 1.0], "A/A")
        assert (prior.spread, prior.degrees, prior.source) == (pytest.approx(1.4826 * 0.03), 2.5, "A/A")
        assert robust_prior([0.01] * 99, "x").degrees == 12.0

    def test_of_normal_differences_it_is_their_spread(self):
        generator = random.Random(3)
        nights = [[generator.gauss(0.04, 0.01) for _ in range(4)] for _ in range(2000)]
        prior = robust_prior([each for night in nights for each in contrasts(night)], "nights")
        assert prior.spread == pytest.approx(0.01, rel=0.03)

    def test_too_little_makes_no_prior(self):
        with pytest.raises(ValueError, match="2 differences are too few"):
            robust_prior([0.1, 0.2], "x")
        with pytest.raises(ValueError, match="above 0"):
            robust_prior([0.0, 0.0, 0.0, 1.0], "x")

    def test_contrasts_keep_the_squares_and_lose_the_mean(self):
        values = [0.3, -0.1, 0.25, 0.7]
        found = contrasts(values)
        assert len(found) == 3
        assert sum(each**2 for each in found) == pytest.approx(3 * numpy.var(values, ddof=1))
        assert contrasts([each + 5 for each in values]) == pytest.approx(found)
        assert contrasts([1.0]) == []


class TestConfidence:
    """An early look asks for a wider interval."""

    @pytest.mark.parametrize("confidence", [0.9, 0.99, 0.9999])
    def test_the_interval_is_scipys(self, confidence):
        log_ratios = [0.01, 0.02, 0.05, 0.03]
        effect = log_effect(log_ratios, confidence=confidence)
        theirs = stats.ttest_1samp(log_ratios, 0.0).confidence_interval(confidence)
        assert (effect.low, effect.high) == pytest.approx((theirs.low, theirs.high))
        assert effect.as_ratio().confidence == confidence
        quantiles = stats.t.ppf(0.5 + confidence / 2, 3) + stats.t.ppf(0.8, 3)
        assert effect.detectable == pytest.approx(quantiles * numpy.std(log_ratios, ddof=1) / 2)


class TestLogDifference:
    """Runs that were not interleaved: the two-sample t."""

    @given(
        st.lists(st.floats(-1, 1), min_size=1, max_size=6), st.lists(st.floats(-1, 1), min_size=2, max_size=6)
    )
    def test_it_is_scipys_pooled_t(self, left, right):
        effect = log_difference(left, right)
        if len(left) == 1:
            squares = (len(right) - 1) * numpy.var(right, ddof=1)
            error = math.sqrt(squares / (len(right) - 1) * (1 + 1 / len(right)))
            half = stats.t.ppf(0.975, len(right) - 1) * error
            assert effect.high - effect.theta == pytest.approx(half, abs=1e-9)
            return
        if min(numpy.ptp(left), numpy.ptp(right)) < 1e-6:
            return
        theirs = stats.ttest_ind(left, right).confidence_interval(0.95)
        assert (effect.low, effect.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6, abs=1e-9)

    def test_a_prior_is_mixed_in(self):
        # Spread of both sides 0; prior 0.01 worth 4, with 2 degrees of its own: s~² = 4 / 6 · 0.0001.
        effect = log_difference([0.1, 0.1], [0.0, 0.0], Prior(0.01, 4.0, "x"))
        assert effect.high - 0.1 == pytest.approx(stats.t.ppf(0.975, 6) * 0.01 * math.sqrt(4 / 6))
        assert "two-sample t of 2 and 2 runs" in effect.method

    @pytest.mark.parametrize(
        ("left", "right"), [([], [1.0, 2.0, 3.0]), ([1.0], [1.0]), ([1.0, 2.0, 3.0], [])]
    )
    def test_too_few_are_refused(self, left, right):
        with pytest.raises(ValueError, match="three in all"):
            log_difference(left, right)


@pytest.mark.parametrize(
    ("low", "estimate", "high", "said"),
    [
        (1.001, 1.006, 1.011, "slower"),
        (1.001, 1.004, 1.007, "no"),
        (0.999, 1.02, 1.041, "no"),
        (0.98, 0.99, 0.999, "faster"),
        (0.994, 0.997, 0.999, "no"),
        (1.0, 1.0, 1.0, "no"),
    ],
)
def test_what_is_clear_and_large_enough_has_moved(low, estimate, high, said):
    effect = Effect(
        estimate=estimate, low=low, high=high, confidence=0.95, repeats=4, smallest_detectable=0.01
    )
    assert moved(effect, 0.005) == said


class TestMetamorphic:
    """What must not change, or must change just so, whatever the numbers are."""

    REPEATS = st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=8)

    @given(REPEATS)
    def test_swapping_the_arms_negates(self, log_ratios):
        there, back = log_effect(log_ratios), log_effect([-each for each in log_ratios])
        assert (back.theta, back.low, back.high) == pytest.approx((-there.theta, -there.high, -there.low))

    @given(REPEATS)
    def test_ten_percent_more_is_ten_percent_more(self, log_ratios):
        plain = log_effect(log_ratios).as_ratio()
        more = log_effect([each + math.log(1.1) for each in log_ratios]).as_ratio()
        assert more.estimate == pytest.approx(1.1 * plain.estimate)
        assert more.low == pytest.approx(1.1 * plain.low)
        assert more.smallest_detectable == pytest.approx(plain.smallest_detectable)

    @given(st.permutations([0.01, -0.02, 0.05, 0.07, 0.1]))
    def test_the_order_of_the_pairs_is_nothing(self, log_ratios):
        ordered, shuffled = log_effect(sorted(log_ratios)), log_effect(log_ratios)
        assert (shuffled.low, shuffled.high) == pytest.approx((ordered.low, ordered.high))

    @given(REPEATS, st.floats(-3, 3))
    def test_what_both_arms_share_cancels_in_the_matched_ratio(self, content, shared):
        left = series(*(math.exp(each) for each in content))
        right = series(*(math.exp(2 * each) for each in content))
        plain = median_log_ratio(left, right)
        scaled = [{step: math.exp(shared) * value for step, value in arm.items()} for arm in (left, right)]
        assert median_log_ratio(*scaled) == pytest.approx(plain, abs=1e-9)
