# SPDX-License-Identifier: Apache-2.0
"""Each function against values worked out by hand, and against numpy and statistics where those have it."""

import math
import random
import statistics

import numpy as np
import pytest

from check_metrics import functions
from check_metrics.errors import DataError
from tests.check_metrics.helpers import judge, judge_arms, series

VALUES = series("x", [4.0, 1.0, 3.0, 2.0, 10.0])


def test_by_hand() -> None:
    assert functions.lowest(VALUES) == 1.0
    assert functions.highest(VALUES) == 10.0
    assert functions.mean(VALUES) == 4.0
    assert functions.median(VALUES) == 3.0
    assert functions.count(VALUES) == 5.0
    assert functions.first(VALUES) == 4.0
    assert functions.last(VALUES) == 10.0
    # deviations 0 -3 -1 -2 6: squares sum to 50, over 4
    assert functions.std(VALUES) == pytest.approx(math.sqrt(12.5))
    # sum of (step - 3)(value - 4) = 0 + 3 + 0 - 2 + 12 = 13, over 10
    assert functions.slope(VALUES) == pytest.approx(1.3)
    # rank 0.9 * 4 = 3.6: between 4 and 10
    assert functions.percentile(VALUES, 90.0) == pytest.approx(7.6)
    assert functions.percentile(VALUES, 0.0) == 1.0
    assert functions.percentile(VALUES, 100.0) == 10.0
    assert functions.all_finite(VALUES) == 1.0


def test_median_of_an_even_count() -> None:
    assert functions.median(series("x", [1.0, 2.0, 10.0, 20.0])) == 6.0


@pytest.mark.parametrize(("threshold", "share"), [(3.0, 0.6), (3.5, 0.4), (11.0, 0.0), (0.0, 1.0)])
def test_ratio_above_counts_equal_values(threshold: float, share: float) -> None:
    assert functions.ratio_above(VALUES, threshold) == share


@pytest.mark.parametrize(
    ("top", "mean"),
    [
        (0.2, 2.5),  # 5 * 0.8 = 4 stay: 1 2 3 4
        (0.1, 2.5),  # 4.5 is cut down to 4
        (0.5, 1.5),  # 2.5 is cut down to 2
        (0.9, 1.0),  # none would stay, so one does
        (1.0, 1.0),
        (0.0, 4.0),
    ],
)
def test_mean_without_the_top(top: float, mean: float) -> None:
    assert functions.mean(VALUES, top) == mean


def test_slope_uses_step_numbers() -> None:
    assert functions.slope(series("x", {10: 5.0, 20: 7.0, 40: 11.0})) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["std", "slope"])
def test_one_value_has_no_spread(name: str) -> None:
    result = judge(f'{name}(data["x"]) < 1', {"x": [1.0]})
    assert result.status == "FAIL"
    assert "needs two values" in result.message


def test_ratio_is_the_exponential_of_the_median_log() -> None:
    # ratios 0.5, 0.8, 2: the median is 0.8 whatever the other two are
    arms = {"a": {"t": [1.0, 8.0, 6.0]}, "b": {"t": [2.0, 10.0, 3.0]}}
    result = judge_arms('ratio(a["t"], b["t"]) < 0.9', arms)
    assert result.value == pytest.approx(0.8)
    # of two ratios the geometric mean: sqrt(0.5 * 0.8)
    assert judge_arms('ratio(a["t"], b["t"], 1, 3) < 1', arms).value == pytest.approx(math.sqrt(0.4))


def test_ratio_needs_positive_values() -> None:
    with pytest.raises(DataError, match=r'"x" is not at step 2'):
        functions.ratio(series("x", [1.0, 0.0]), series("y", [1.0, 1.0]))
    with pytest.raises(DataError, match=r'"y" is not at step 1'):
        functions.ratio(series("x", [1.0]), series("y", [-1.0]))


def test_max_rel_diff() -> None:
    # |1.1 - 1| / 1 and |1.5 - 2| / 2
    arms = {"a": {"l": [1.1, 1.5, 0.0]}, "b": {"l": [1.0, 2.0, 0.0]}}
    assert judge_arms('max_rel_diff(a["l"], b["l"]) < 0.3', arms).value == pytest.approx(0.25)
    with pytest.raises(DataError, match="0 at step 1"):
        functions.max_rel_diff(series("a", [1.0]), series("b", [0.0]))


def test_mean_rel_diff_keeps_the_sign() -> None:
    # +0.1 and -0.25 and 0: jitter cancels where an offset does not.
    arms = {"a": {"l": [1.1, 1.5, 0.0]}, "b": {"l": [1.0, 2.0, 0.0]}}
    assert judge_arms('mean_rel_diff(a["l"], b["l"]) < 0.3', arms).value == pytest.approx(-0.05)
    assert judge_arms('abs(mean_rel_diff(b["l"], a["l"], 2, 3)) < 0.4', arms).value == pytest.approx(1 / 3)
    with pytest.raises(DataError, match=r"mean_rel_diff\(\) divides by .* 0 at step 1"):
        functions.mean_rel_diff(series("a", [1.0]), series("b", [0.0]))


def test_overhead_is_what_slow_steps_add_to_the_median() -> None:
    # Nine steps of 1 and one of 3: mean 1.2, median 1.
    data = {"t": [1.0] * 9 + [3.0]}
    assert judge('overhead(data["t"]) < 0.3', data).value == pytest.approx(0.2)
    with pytest.raises(DataError, match='"t" is not at step 1'):
        functions.overhead(series("t", [0.0, 1.0]))


def test_spike_share() -> None:
    # Median 10, deviations 0 to 1 with a median of 0.5: a spike is above 10 + max(2.5, 1) = 12.5.
    values = [9.0, 9.5, 10.0, 10.5, 11.0, 12.5, 12.6, 30.0, 9.5, 10.0]
    window = series("t", values)
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    limit = middle + max(5 * deviation, 0.1 * middle)
    assert functions.spike_limit(values) == pytest.approx(limit)
    assert functions.spike_share(window) == sum(value > limit for value in values) / 10 == 0.1
    # Without any scatter, 10 % above the median is where a spike begins.
    assert judge('spike_share(data["t"]) < 1', {"t": [1.0, 1.0, 1.0, 1.1, 1.11]}).value == 0.2


def test_tail_ratio_sees_what_the_typical_ratio_does_not() -> None:
    periodic = [3.0 if step % 10 == 0 else 1.0 for step in range(1, 51)]
    arms = {"a": {"t": periodic}, "b": {"t": [2.0] * 50}}
    assert judge_arms('ratio(a["t"], b["t"]) < 1', arms).value == pytest.approx(0.5)
    # Of five slow steps the slowest is left out: (45 · 1 + 4 · 3) / 49, over 1.
    assert judge_arms('tail_ratio(a["t"], b["t"]) < 1.05', arms).value == pytest.approx(57 / 49)
    assert judge_arms('tail_ratio(b["t"], a["t"]) < 1.05', arms).value == pytest.approx(49 / 57)


def test_one_slow_step_is_no_tail() -> None:
    arms = {"a": {"t": [1.0, 90.0, 1.0, 1.0]}, "b": {"t": [2.0] * 4}}
    assert judge_arms('tail_ratio(a["t"], b["t"]) < 1.05', arms).value == pytest.approx(1.0)
    with pytest.raises(DataError, match='"y" is not at step 1'):
        functions.tail_ratio(series("x", [1.0, 1.0]), series("y", [0.0, 1.0]))
    with pytest.raises(DataError, match="needs two values"):
        functions.tail_ratio(series("x", [1.0]), series("y", [1.0]))


def test_peak_ratio_counts_blocks_of_2_mib_and_needs_no_equal_steps() -> None:
    block = 1 / 512
    # 100 blocks and less than half of one; 200 blocks less a third of one.
    arms = {
        "a": {"m": [0.1, 100.4 * block]},
        "b": {"m": {1: 199.67 * block}},
        "c": {"m": [block / 3]},
    }
    assert judge_arms('peak_ratio(a["m"], b["m"]) < 0.8', arms).value == 0.5
    result = judge_arms('peak_ratio(a["m"], c["m"]) < 0.8', arms)
    assert (result.status, result.value) == ("FAIL", None)
    assert "no block of 2 MiB" in result.message


def test_like_numpy_and_statistics() -> None:
    generator = random.Random(7)
    for size in (2, 3, 10, 101):
        values = [generator.lognormvariate(0.0, 1.0) for _ in range(size)]
        sample = series("x", values)
        assert functions.mean(sample) == pytest.approx(statistics.mean(values), rel=1e-14)
        assert functions.median(sample) == pytest.approx(statistics.median(values), rel=1e-14)
        assert functions.std(sample) == pytest.approx(statistics.stdev(values), rel=1e-12)
        line = np.polyfit(range(1, size + 1), values, 1)
        assert functions.slope(sample) == pytest.approx(float(line[0]), rel=1e-9, abs=1e-12)
        for p in (1.0, 12.5, 50.0, 95.0):
            assert functions.percentile(sample, p) == pytest.approx(
                float(np.percentile(values, p)), rel=1e-12
            )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('1 / (data["x"]["1"] - 1) < 3', "divides by zero"),
        ('1 % (data["x"]["1"] - 1) < 3', "divides by zero"),
        ('data["x"]["3"] * 10 < 3', "not a finite real number"),
        ('data["x"]["3"] ** 2 < 3', "is too large"),
        ('(-data["x"]["2"]) ** 0.5 < 3', "not a finite real number"),
        ('std(data["x"]) < 3', "too large to compute with"),
        ('mean(data["y"]) < 3', "too large to compute with"),
        ('slope(data["z"]) < 3', "too large to compute with"),
        ('max_rel_diff(data["x"], data["w"]) < 3', "too large to compute with"),
    ],
)
def test_results_outside_the_finite_numbers_fail(text: str, message: str) -> None:
    data = {
        "x": [1.0, 2.0, 1e308],
        "y": [1.7e308, 1.7e308],
        "z": [1.7e308, -1.7e308, 1.7e308],
        "w": [1e-300, 1e-300, 1e-300],
    }
    result = judge(text, data)
    assert result.status == "FAIL"
    assert result.value is None
    assert message in result.message
