# SPDX-License-Identifier: Apache-2.0
"""Where warm-up ends: floors and cuts by hand, the cost against numpy, and runs that never become steady."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from check_metrics import Series
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.steady import NotSteady, floor_steps, settled_after, unsettled_steps, warmup_of
from lora_suite.launch.record import RunRecord
from lora_suite.plan.metric_names import LOSS, STEP_TIME, TOTAL_STEP_TIME


def run(
    times: list[float], *, segments: tuple[int, ...] = (1,), name: str = STEP_TIME, **others: Any
) -> Evidence:
    """A run with these step times, from step 1."""
    steps = tuple(range(1, len(times) + 1))
    record = RunRecord(run_id="r", case="c", started="", recipe={}, recipe_hash="", segments=list(segments))
    loss = Series(LOSS, steps, (1.0,) * len(steps))
    return Evidence({name: Series(name, steps, tuple(times)), LOSS: loss, **others}, record)


def scatter(count: int, spread: float = 0.02, seed: int = 1) -> list[float]:
    """Step times around 1."""
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0.0, spread)) for _ in range(count)]


class TestFloor:
    """The first max(warmup, 10 %) of each segment."""

    @pytest.mark.parametrize(
        ("steps", "warmup", "expected"), [(10, 3, 3), (30, 3, 3), (50, 3, 5), (99, 3, 9), (8, 8, 8)]
    )
    def test_length(self, steps, warmup, expected):
        assert floor_steps(run([1.0] * steps), warmup) == set(range(1, expected + 1))

    def test_each_segment_has_its_own(self):
        # Segments of 60 and 40 steps: 6 and 4.
        floor = floor_steps(run([1.0] * 100, segments=(1, 61)), 3)
        assert floor == {*range(1, 7), *range(61, 65)}

    def test_a_resume_after_the_last_step_is_none(self):
        assert floor_steps(run([1.0] * 20, segments=(1, 21)), 3) == {1, 2, 3}


class TestCut:
    """One change point at a time."""

    def test_by_hand(self):
        # Four steps of 3, then steps of 1: 6 · log 3 of deviation before, none after.
        assert settled_after([math.log(3)] * 4 + [0.0] * 8) == 4

    def test_compilation_and_then_caches(self):
        logs = [math.log(value) for value in (90.0, 60.0, *[1.5] * 4, *scatter(30))]
        assert settled_after(logs) == 6

    @pytest.mark.parametrize("above", [1.08, 1.0, 0.5])
    def test_what_is_less_than_10_percent_above_stays(self, above):
        assert settled_after([math.log(above)] * 6 + [0.0] * 12) == 0

    def test_what_is_below_is_cut_where_asked(self):
        logs = [math.log(0.5)] * 6 + [0.0] * 12
        assert settled_after(logs, either_way=True) == 6

    def test_a_few_low_values_at_the_end_are_no_level(self):
        assert settled_after([0.5] * 22 + [0.0] * 2) == 0

    def test_noise_alone_is_not_cut(self):
        cut = [settled_after([math.log(v) for v in scatter(40, 0.2, seed)]) for seed in range(200)]
        assert sum(map(bool, cut)) <= 2

    @pytest.mark.parametrize("logs", [[], [0.0], [1.0, 0.0, 0.0]])
    def test_too_few_values_have_no_change(self, logs):
        assert settled_after(logs) == 0

    def test_the_cut_has_the_least_absolute_deviation(self):
        """Against every cut, with numpy's median."""
        for seed in range(20):
            logs = [math.log(v) + (0.8 if i < 7 else 0.0) for i, v in enumerate(scatter(25, 0.1, seed))]

            def cost(cut: int, logs: list[float] = logs) -> float:
                parts = np.array(logs[:cut]), np.array(logs[cut:])
                return sum(float(np.abs(part - np.median(part)).sum()) for part in parts)

            best = min(range(1, 21), key=cost)
            assert settled_after(logs) == best == 7


class TestRun:
    """Floor and cut of a run."""

    def test_a_steady_run_loses_its_floor_alone(self):
        found = warmup_of(run(scatter(40)), 3)
        assert found.steps == found.floor == {1, 2, 3, 4}

    def test_a_long_warm_up_is_cut(self):
        found = warmup_of(run([4.0] * 12 + scatter(28)), 3)
        assert found.more == set(range(5, 13))

    def test_each_segment_is_cut(self):
        times = [4.0] * 12 + scatter(28) + [3.0] * 10 + scatter(30)
        found = warmup_of(run(times, segments=(1, 41)), 3)
        assert found.steps == {*range(1, 13), *range(41, 51)}

    def test_up_to_half_is_cut_and_more_is_not_steady(self):
        assert warmup_of(run([1.5] * 20 + scatter(20)), 3).steps == set(range(1, 21))
        with pytest.raises(NotSteady, match=r"steps 5-21 of 40 take 5\d % longer than the rest"):
            warmup_of(run([1.5] * 21 + scatter(19)), 3)

    def test_total_step_times_stand_in(self):
        times = [4.0] * 12 + scatter(28)
        assert warmup_of(run(times, name=TOTAL_STEP_TIME), 3).more == set(range(5, 13))

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
    def test_what_is_no_time_is_left_to_the_ratio(self, value):
        assert warmup_of(run([4.0] * 12 + [value] + scatter(27)), 3).more == frozenset()

    def test_without_times_there_is_the_floor(self):
        assert warmup_of(run([1.0] * 40, name="other"), 3).steps == {1, 2, 3, 4}

    def test_a_ratio_may_be_below_at_first(self):
        logs = dict.fromkeys(range(5, 30), math.log(0.8)) | dict.fromkeys(range(30, 41), 0.0)
        with pytest.raises(NotSteady, match="steps 5-29 of 40 take 25 % longer") as caught:
            unsettled_steps(run([1.0] * 40), logs, either_way=True)
        assert caught.value.slower == pytest.approx(-0.2)
        assert unsettled_steps(run([1.0] * 40), logs) == frozenset()
