# SPDX-License-Identifier: Apache-2.0
"""The tail gate: which ratios get one, and slow steps that a median hides, on run directories."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from lora_suite.judge.pair import judge_pair
from lora_suite.judge.run import judge_run
from lora_suite.judge.tail import tail_checks
from lora_suite.judge.verdict import PairVerdict, RunVerdict
from lora_suite.plan.model import Canary
from tests.judge.helpers import DONE, FULL, LORA, RATIO, make_case, make_pair, planned, write_run

STEPS = 40
TIME = "timing/train/step_time"
GATE = f'tail_ratio(lora["{TIME}"], full["{TIME}"]) < 1.05'
FULL_TIMES = (0.100, 0.102, 0.099, 0.101)
LORA_TIMES = (0.070, 0.0705, 0.0695, 0.070)


def judged(
    tmp_path: Path, lora: dict[int, float], full: dict[int, float] | None = None, **pair: Any
) -> PairVerdict:
    """Four repeats of 40 steps; factors by step of either arm."""
    slow = {"lora": lora, "full": full or {}}
    runs: dict[str, list[RunVerdict]] = {"full": [], "lora": []}
    for arm, stem, times in (("full", FULL, FULL_TIMES), ("lora", LORA, LORA_TIMES)):
        case = make_case(stem, (), STEPS)
        for repeat, seconds in enumerate(times, 1):

            def damage(metrics: dict[str, Any], _: dict[str, Any], arm: str = arm) -> None:
                for step, factor in slow[arm].items():
                    metrics[TIME][str(step)] *= factor

            folder = write_run(
                tmp_path / stem / str(repeat), case, repeat, step_time=seconds, steps=STEPS, damage=damage
            )
            runs[arm].append(judge_run(case, planned(stem, repeat, "fsdp2", arm), folder, DONE))
    return judge_pair(make_pair(**pair), runs)


def every(step: int, factor: float) -> dict[int, float]:
    """Every so many steps longer by a factor."""
    return dict.fromkeys(range(step, STEPS + 1, step), factor)


class TestWhichRatios:
    """A ratio of step times gets a gate, nothing else does."""

    @pytest.mark.parametrize(
        ("check", "gates"),
        [
            (RATIO, [GATE]),
            (RATIO.replace("< 0.8", "<= 1"), [GATE]),
            (f'0.8 > ratio(lora["{TIME}"], full["{TIME}"])', [GATE]),
            # Full slower than LoRA by a factor: LoRA is the arm that must be fast.
            (f'ratio(full["{TIME}"], lora["{TIME}"]) > 1.2', [GATE]),
            (f'ratio(full["{TIME}"], lora["{TIME}"]) >= 1.2', [GATE]),
            (RATIO.replace("< 0.8", "== 0.8"), []),
            (RATIO.replace("step_time", "total_step_time"), []),
            ('max_rel_diff(lora["train/loss"], full["train/loss"]) < 1e-3', []),
            (f'max(lora["{TIME}"]) < 3', []),
            ("ratio(", []),
        ],
    )
    def test_gate(self, check, gates):
        assert tail_checks([check]) == gates

    def test_two_limits_on_one_ratio_have_one_gate(self):
        assert tail_checks([RATIO, RATIO.replace("0.8", "0.9")]) == [GATE]

    def test_a_gate_of_their_own_stands_alone(self):
        assert tail_checks([RATIO, GATE.replace("1.05", "1.5")]) == []
        assert tail_checks([RATIO, f'tail_ratio(full["{TIME}"], lora["{TIME}"]) > 0.8']) == []


class TestGate:
    """On run directories."""

    def test_a_periodic_stall_fails_though_the_median_does_not_move(self, tmp_path):
        verdict = judged(tmp_path, every(10, 3.0))
        ratio, tail = verdict.checks
        assert ratio.state == "PASS"
        assert ratio.effect is not None
        assert ratio.effect.estimate == pytest.approx(0.695, rel=0.01)
        assert (tail.state, verdict.state) == ("FAIL", "FAIL")
        # Steps 5 to 40 count, 4 of them of 3; the largest is left out: (32 + 3 · 3) / 35.
        assert tail.effect is not None
        assert tail.effect.estimate == pytest.approx(41 / 35)
        assert tail.message.endswith("(lora: 11 % of the steps, one in 10, full: 0 % of the steps)")

    def test_the_interval_is_that_of_the_repeats(self, tmp_path):
        jitter = {step: 1 + 0.3 * (step % 7 == 0) for step in range(1, STEPS + 1)}
        effect = judged(tmp_path, every(10, 3.0), jitter).checks[1].effect
        assert effect is not None
        logs = [math.log(each) for each in effect.ratios]
        assert effect.estimate == pytest.approx(math.exp(statistics.fmean(logs)))
        assert len(logs) == 4

    @pytest.mark.parametrize("lora", [{}, {20: 50.0}, every(10, 1.2)])
    def test_no_tail_passes_nor_does_one_slow_step_count(self, tmp_path, lora):
        assert judged(tmp_path, lora).checks[1].state == "PASS"

    def test_what_both_arms_have_cancels(self, tmp_path):
        assert judged(tmp_path, every(10, 3.0), every(10, 3.0)).checks[1].state == "PASS"

    def test_a_limit_of_their_own(self, tmp_path):
        own = GATE.replace("1.05", "1.5")
        verdict = judged(tmp_path, every(10, 3.0), checks=(RATIO, own))
        assert [(check.expression, check.state) for check in verdict.checks] == [
            (RATIO, "PASS"),
            (own, "PASS"),
        ]

    def test_irregular_slow_steps_have_no_period(self, tmp_path):
        slow = dict.fromkeys((7, 13, 17, 29, 31), 4.0)
        message = judged(tmp_path, slow).checks[1].message
        assert "14 % of the steps, full" in message

    def test_one_repeat_has_no_interval(self, tmp_path):
        verdict = judged(tmp_path, every(10, 3.0), repeats=1)
        assert verdict.checks[1].state == "INCONCLUSIVE"
        assert "one repeat shows no spread" in verdict.checks[1].message

    def test_one_step_is_no_tail(self, tmp_path):
        check = judged(tmp_path, {}, warmup=STEPS - 1).checks[1]
        assert (check.state, check.message) == ("INCONCLUSIVE", "run 1: one step is no tail")

    def test_what_the_ratio_cannot_read_the_gate_cannot(self, tmp_path):
        verdict = judged(tmp_path, every(1, 0.0))
        assert {check.state for check in verdict.checks} == {"INCONCLUSIVE"}
        assert verdict.checks[1].message == verdict.checks[0].message

    def test_a_canary_is_judged_on_its_own_checks(self, tmp_path):
        verdict = judged(tmp_path, every(10, 3.0), canary=Canary("same", 1.02))
        assert [check.expression for check in verdict.checks] == [RATIO]
