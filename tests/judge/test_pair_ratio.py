# SPDX-License-Identifier: Apache-2.0
"""Ratios of a pair: the interval over repeats, matched steps, warm-up, priors and looks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from check_metrics import parse
from lora_suite.judge.block import Block
from lora_suite.judge.evidence import read_evidence
from lora_suite.judge.pair import judge_pair
from lora_suite.judge.ratio import Method, sides_of
from lora_suite.judge.run import judge_run
from lora_suite.judge.statistics import Prior
from lora_suite.judge.verdict import PairVerdict, RunVerdict
from tests.judge.helpers import DONE, FULL, LORA, RATIO, make_case, make_pair, planned, write_run
from tests.judge.pairs import FULL_TIMES, LORA_TIMES, every, judged, only, ratio, runs
from tests.judge.runs import record


class TestRatio:
    """A ratio is decided on its interval."""

    def test_the_effect_is_the_t_interval_of_the_log_ratios(self, tmp_path):
        verdict = judged(tmp_path)
        logs = [math.log(a / b) for a, b in zip(LORA_TIMES, FULL_TIMES, strict=True)]
        theirs = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
        check, tail = verdict.checks
        assert tail.expression == RATIO.replace("ratio", "tail_ratio").replace("0.8", "1.05")
        assert check.effect is not None
        assert check.effect.estimate == pytest.approx(math.exp(statistics.fmean(logs)))
        assert (check.effect.low, check.effect.high) == pytest.approx(
            (math.exp(theirs.low), math.exp(theirs.high))
        )
        quantiles = stats.t.ppf(0.975, 3) + stats.t.ppf(0.8, 3)
        detectable = math.expm1(quantiles * statistics.stdev(logs) / 2)
        assert check.effect.smallest_detectable == pytest.approx(detectable)
        assert check.effect.repeats == 4
        assert check.limit == 0.8

    @pytest.mark.parametrize(
        ("operator", "limit", "state"),
        [
            ("<", 0.8, "PASS"),
            ("<", 0.6, "FAIL"),
            ("<", 0.696, "INCONCLUSIVE"),
            (">", 0.6, "PASS"),
            (">=", 0.8, "FAIL"),
            ("<=", 0.8, "PASS"),
        ],
    )
    def test_state(self, tmp_path, operator, limit, state):
        verdict = judged(tmp_path, pair=ratio(operator, limit))
        assert verdict.state == verdict.checks[0].state == state

    def test_the_limit_may_stand_on_the_left(self, tmp_path):
        pair = make_pair(
            checks=('0.6 > ratio(lora["timing/train/step_time"], full["timing/train/step_time"])',)
        )
        assert judged(tmp_path, pair=pair).state == "FAIL"

    def test_an_inconclusive_one_says_what_could_have_been_seen(self, tmp_path):
        message = judged(tmp_path, pair=ratio("<", 0.696)).checks[0].message
        assert "lies across the limit < 0.696" in message
        assert "smallest detectable effect" in message

    def test_the_first_three_steps_of_a_run_do_not_count(self, tmp_path):
        def slow_start(metrics, record):
            for step in ("1", "2", "3"):
                metrics["timing/train/step_time"][step] = 50.0

        effect = judged(tmp_path, every("lora", slow_start)).checks[0].effect
        assert effect == judged(tmp_path / "other").checks[0].effect

    def test_nor_do_those_after_a_resume(self, tmp_path):
        def resumed(metrics, record):
            record["segments"] = [1, 6]
            for step in ("6", "7", "8"):
                metrics["timing/train/step_time"][step] = 50.0

        effect = judged(tmp_path, lambda arm, repeat: resumed).checks[0].effect
        assert effect == judged(tmp_path / "other").checks[0].effect

    def test_arms_of_which_only_one_was_resumed_have_no_equal_steps(self, tmp_path):
        verdict = judged(tmp_path, only("lora", 2, record(segments=[1, 6])))
        assert verdict.state == "INCONCLUSIVE"
        assert verdict.checks[0].message == "run 2: only one arm has step 6-8"

    def test_nothing_left_after_warm_up_is_inconclusive(self, tmp_path):
        verdict = judged(tmp_path, pair=make_pair(warmup=10))
        assert verdict.state == "INCONCLUSIVE"
        assert "no step is left after the first 10 (warm-up)" in verdict.checks[0].message

    def test_a_window_of_the_check_is_kept(self, tmp_path):
        def slow_end(metrics, record):
            for step in range(6, 11):
                metrics["timing/train/step_time"][str(step)] = 50.0

        text = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"], 1, 6) < 0.8'
        assert judged(tmp_path, every("lora", slow_end), make_pair(checks=(text,))).state == "PASS"
        assert judged(tmp_path, every("lora", slow_end)).state == "FAIL"

    def test_one_repeat_is_never_enough(self, tmp_path):
        verdict = judged(tmp_path, pair=make_pair(repeats=1), full=[0.1], lora=[0.05])
        assert verdict.state == "INCONCLUSIVE"
        assert verdict.checks[0].effect is None
        assert verdict.checks[0].value == "0.5000"
        assert "one repeat shows no spread" in verdict.checks[0].message

    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_what_is_not_positive_has_no_ratio(self, tmp_path, value):
        def damage(metrics, record):
            metrics["timing/train/step_time"]["7"] = value

        verdict = judged(tmp_path, only("full", 3, damage))
        assert verdict.state == "INCONCLUSIVE"
        assert verdict.checks[0].message == f"run 3: step 7 is {value:g}: a ratio needs positive values"

    def test_series_sampled_by_the_clock_are_compared_by_their_typical_values(self, tmp_path):
        def sampled(arm, repeat):
            peak = 30.0 if arm == "lora" else 40.0
            series = {str(second): peak for second in range(5 if arm == "lora" else 9)}
            return lambda metrics, record: metrics.update({"ray/node.0.gpu.0.mem_gb": series})

        verdict = judged(tmp_path, sampled, ratio("<", 0.8, "ray/node.0.gpu.0.mem_gb"))
        assert verdict.state == "PASS"
        assert verdict.checks[0].effect is not None
        assert verdict.checks[0].effect.estimate == pytest.approx(0.75)

    def test_a_sample_of_zero_before_anything_was_allocated_is_no_harm(self, tmp_path):
        def sampled(arm, repeat):
            series = {"0": 0.0, "2": 30.0, "4": 30.0} if arm == "lora" else {"0": 0.0, "2": 40.0, "4": 40.0}
            return lambda metrics, record: metrics.update({"ray/node.0.gpu.0.mem_gb": series})

        check = judged(tmp_path, sampled, ratio("<", 0.8, "ray/node.0.gpu.0.mem_gb")).checks[0]
        assert (check.state, check.value) == ("PASS", "0.7500 [0.7500, 0.7500]")

    def test_a_sampled_series_of_zeros_has_no_ratio(self, tmp_path):
        def idle(metrics, record):
            metrics["ray/node.0.gpu.0.mem_gb"] = {"0": 0.0, "1": 0.0}

        verdict = judged(tmp_path, lambda arm, repeat: idle, ratio("<", 0.8, "ray/node.0.gpu.0.mem_gb"))
        assert verdict.state == "INCONCLUSIVE"
        assert verdict.checks[0].message == "run 1: ray/node.0.gpu.0.mem_gb is not positive"

    def test_swapping_the_arms_inverts_the_effect(self, tmp_path):
        there = judged(tmp_path).checks[0].effect
        back = judged(tmp_path / "other", full=LORA_TIMES, lora=FULL_TIMES).checks[0].effect
        assert there is not None
        assert back is not None
        assert back.estimate == pytest.approx(1 / there.estimate)
        assert back.low == pytest.approx(1 / there.high)


class TestSeen:
    """What a report is given of a ratio."""

    def test_each_repeat_and_the_method_stand_in_the_effect(self, tmp_path):
        effect = judged(tmp_path).checks[0].effect
        assert effect is not None
        assert effect.ratios == pytest.approx([a / b for a, b in zip(LORA_TIMES, FULL_TIMES, strict=True)])
        assert effect.method == "paired t over 4 repeats"

    def test_matched_steps_with_those_left_out(self, tmp_path):
        matched = judged(tmp_path).checks[0].matched
        assert [each.repeat for each in matched] == [1, 2, 3, 4]
        first = matched[0]
        assert first.steps == list(range(1, 11))
        assert first.trimmed == [1, 2, 3]
        assert first.left == pytest.approx([5.07, *[0.07] * 9])
        assert first.right == pytest.approx([5.1, *[0.1] * 9])

    def test_series_by_the_clock_have_no_matched_steps(self, tmp_path):
        def sampled(metrics, record):
            metrics["ray/node.0.gpu.0.mem_gb"] = {"0": 30.0, "1": 30.0}

        check = judged(
            tmp_path, lambda arm, repeat: sampled, ratio("<", 1.1, "ray/node.0.gpu.0.mem_gb")
        ).checks[0]
        assert (check.state, check.matched) == ("PASS", [])


class TestPriorsAndLooks:
    """What is known beforehand of the spread, and how sure an early look must be."""

    LOGS = tuple(math.log(a / b) for a, b in zip(LORA_TIMES, FULL_TIMES, strict=True))

    def test_a_prior_goes_to_the_check_of_its_text(self, tmp_path):
        other = RATIO.replace("0.8", "0.9")
        pair = make_pair(checks=(RATIO, other))
        checks = judge_pair(pair, runs(tmp_path), {RATIO: Prior(0.05, 9.0, "40 nights")}).checks
        first, second = (check.effect for check in checks[:2])
        assert first is not None
        assert second is not None
        # s~² = (9 · 0.05² + 3 · s²) / 12, with 12 degrees of freedom.
        spread = math.sqrt((9 * 0.05**2 + 3 * statistics.variance(self.LOGS)) / 12)
        half = stats.t.ppf(0.975, 12) * spread / 2
        assert math.log(first.high) == pytest.approx(statistics.fmean(self.LOGS) + half)
        assert "40 nights" in first.method
        assert second.method == "paired t over 4 repeats"

    def test_the_confidence_is_the_looks(self, tmp_path):
        effect = judge_pair(make_pair(), runs(tmp_path), confidence=0.999).checks[0].effect
        assert effect is not None
        theirs = stats.ttest_1samp(self.LOGS, 0.0).confidence_interval(0.999)
        assert (effect.low, effect.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)))
        assert effect.confidence == 0.999


def slow_start(arm: str, repeat: int, until: int, factor: float) -> Callable[[str, int, int], float]:
    """One run slower up to a step."""
    return lambda one, number, step: factor if (one, number) == (arm, repeat) and step <= until else 1.0


class TestWarmUp:
    """Steps at which an arm was not warm yet leave both arms; a run that never was leaves no verdict."""

    STEPS = 40

    def judged(self, tmp_path: Path, slow: Callable[[str, int, int], float], **options: Any) -> PairVerdict:
        """Judge 4 repeats of 40 steps; slow: a factor by arm, repeat and step."""
        arms: dict[str, list[RunVerdict]] = {}
        for arm, stem, times in (("full", FULL, FULL_TIMES), ("lora", LORA, LORA_TIMES)):
            case = make_case(stem, (), self.STEPS)
            for repeat, step_time in enumerate(times, 1):

                def damage(metrics, record, arm=arm, repeat=repeat, step_time=step_time):
                    times = metrics[options.get("metric", "timing/train/step_time")]
                    for step in times:
                        times[step] = step_time * slow(arm, repeat, int(step))

                folder = tmp_path / stem / str(repeat)
                write_run(folder, case, repeat, steps=self.STEPS, damage=damage)
                verdict = judge_run(case, planned(stem, repeat, "fsdp2", arm), folder, DONE)
                arms.setdefault(arm, []).append(verdict)
        return judge_pair(options.get("pair", make_pair()), arms)

    def test_a_slow_start_of_one_run_is_cut_from_both_arms_of_its_block(self, tmp_path):
        check = self.judged(tmp_path, slow_start("lora", 2, 15, 3.0)).checks[0]
        assert check.state == "PASS"
        assert check.effect is not None
        assert check.effect.ratios == pytest.approx(list(map(truediv, LORA_TIMES, FULL_TIMES)))
        floor = [1, 2, 3, 4]
        trimmed = [each.trimmed for each in check.matched]
        assert trimmed == [floor, list(range(1, 16)), floor, floor]

    def test_a_run_that_is_slow_for_more_than_half_is_named(self, tmp_path):
        verdict = self.judged(tmp_path, slow_start("full", 3, 24, 1.3))
        assert verdict.state == "INCONCLUSIVE"
        assert verdict.checks[0].message == (
            "run 3: full is not steady: steps 5-24 of 40 take 30 % longer than the rest, "
            "so more than half of the run would be warm-up"
        )

    def test_the_steps_of_a_run_that_is_not_steady_can_be_looked_at(self, tmp_path):
        check = self.judged(tmp_path, slow_start("full", 3, 24, 1.3)).checks[0]
        assert check.effect is None
        assert [each.repeat for each in check.matched] == [1, 2, 3, 4]
        unsteady = check.matched[2]
        assert unsteady.steps == list(range(1, 41))
        assert unsteady.trimmed == [1, 2, 3, 4]
        assert unsteady.right == pytest.approx([1.3 * FULL_TIMES[2]] * 24 + [FULL_TIMES[2]] * 16)

    def test_values_that_no_ratio_has_are_not_drawn(self, tmp_path):
        check = self.judged(
            tmp_path, lambda arm, repeat, step: 0.0 if (arm, repeat, step) == ("lora", 2, 30) else 1.0
        ).checks[0]
        assert check.state == "INCONCLUSIVE"
        assert 30 not in check.matched[1].steps
        assert len(check.matched[1].steps) == 39

    @pytest.mark.parametrize(("slow", "other"), [("lora", "full"), ("full", "lora")])
    def test_batches_of_unlike_lengths_do_not_hide_it_from_the_ratio(self, tmp_path, slow, other):
        """Each run's own times scatter by factors of up to 8, as the batches of both arms do."""

        def factor(arm: str, repeat: int, step: int) -> float:
            return (1 + step * 37 % 8) * (1.3 if arm == slow and step <= 24 else 1.0)

        message = self.judged(tmp_path, factor).checks[0].message
        words = f"run 1: {slow} is not steady against {other}: steps 5-24 of 40 take 30 % longer"
        assert message.startswith(words)

    def test_a_loss_that_falls_is_no_warm_up(self, tmp_path):
        check = self.judged(
            tmp_path,
            lambda arm, repeat, step: 40.0 / step,
            metric="train/loss",
            pair=ratio("<", 0.8, "train/loss"),
        ).checks[0]
        assert check.state == "PASS"
        assert check.matched[0].trimmed == [1, 2, 3, 4]

    def test_medians_of_arms_that_are_not_matched_are_cut_each_by_its_own(self, tmp_path):
        def unmatched(arm: str, repeat: int, step: int) -> float:
            return 3.0 if arm == "lora" and step <= 15 else 1.0

        self.judged(tmp_path, unmatched)
        arms = {arm: read_evidence(tmp_path / stem / "1") for arm, stem in (("full", FULL), ("lora", LORA))}
        form = parse(RATIO).pair
        assert form is not None
        sides = sides_of(form, Block(1, arms), Method(3, matched=False))
        assert sides.log_ratio == pytest.approx(math.log(0.7))
        assert (min(sides.left), min(sides.right)) == (16, 5)
