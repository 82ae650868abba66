# SPDX-License-Identifier: Apache-2.0
"""Windows, holes and finiteness of a series; expected values are counted by hand."""

import math

import pytest

from check_metrics.series import (
    Series,
    cut_ranges,
    describe_ranges,
    describe_steps,
    is_keyed_by_step,
    is_per_step,
    step_ranges,
)
from tests.check_metrics.helpers import series


@pytest.mark.parametrize(
    ("name", "per_step"),
    [
        ("train/loss", True),
        ("timing/train/total_step_time", True),
        ("performance/floor_ratio", True),
        ("validation/loss", False),
        ("timing/validation/total_validation_time", False),
        ("timing/train/checkpointing", False),
        ("timing/train/validation", False),
        ("ray/node.0.gpu.0.mem_gb", False),
        ("rays/x", True),
    ],
)
def test_per_step_names(name: str, per_step: bool) -> None:
    assert is_per_step(name) is per_step


def test_seconds_are_no_steps() -> None:
    assert not is_keyed_by_step("ray/node.0.gpu.0.mem_gb")
    assert is_keyed_by_step("validation/loss")


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, 0, range(1, 11)),
        (1, 0, range(1, 11)),
        (2, 0, range(2, 11)),
        (-6, -1, range(5, 10)),
        (-1, 0, range(10, 11)),
        (2, 5, range(2, 5)),
        (2, -3, range(2, 8)),
        (0, 0, range(1, 11)),
        (-30, 0, range(1, 11)),
        (9, 99, range(9, 11)),
        (11, 0, range(0)),
        (5, 5, range(0)),
        (7, 3, range(0)),
    ],
)
def test_window_counts_step_numbers(start: int | None, end: int, expected: range) -> None:
    ten = series("x", [float(step) for step in range(1, 11)])
    window = ten.window(start, end)
    assert window.steps == tuple(expected)
    assert window.values == tuple(float(step) for step in expected)


def test_window_of_a_resumed_run_is_absolute() -> None:
    resumed = series("x", {step: float(step) for step in range(31, 51)})
    assert resumed.window(2, 0).steps == tuple(range(31, 51))
    assert resumed.window(-6, -1).steps == tuple(range(45, 50))


def test_window_of_sparse_series_counts_steps_not_values() -> None:
    validation = series("validation/loss", {10: 1.0, 20: 2.0, 30: 3.0})
    assert validation.window(-2, 0).steps == (30,)


def test_window_of_an_empty_series_is_empty() -> None:
    assert Series("x", (), ()).window(-6, -1).steps == ()


def test_whole_window_is_the_series_itself() -> None:
    whole = series("x", [1.0, 2.0])
    assert whole.window() is whole


def test_finite() -> None:
    assert series("x", [1.0, 2.0]).finite
    broken = series("x", {1: 1.0, 2: None, 3: math.inf, 4: -math.inf, 5: 0.5})
    assert not broken.finite
    assert broken.nonfinite_steps() == (2, 3, 4)
    assert broken.finite_part() == series("x", {1: 1.0, 5: 0.5})


def test_at() -> None:
    sparse = series("x", {10: 1.0, 30: 3.0})
    assert (sparse.at(10), sparse.at(20), sparse.at(31)) == (1.0, None, None)


def test_missing_steps() -> None:
    holed = series("x", dict.fromkeys((1, 2, 4, 8, 9), 0.0))
    assert holed.missing(1, 10) == [range(3, 4), range(5, 8)]
    assert holed.missing(1, 12) == [range(3, 4), range(5, 8), range(10, 12)]
    assert holed.missing(0, 3) == [range(1)]
    assert holed.missing(8, 10) == []
    assert holed.missing(9, 3) == []


def test_interval_needs_five_values() -> None:
    assert series("x", dict.fromkeys((1, 5, 10, 15, 20), 0.0)).interval == 5
    assert series("x", dict.fromkeys((10, 20, 30, 40, 50), 0.0)).interval == 10
    assert series("x", dict.fromkeys((1, 3), 0.0)).interval == 1
    assert series("x", dict.fromkeys((1, 2, 4, 6, 9), 0.0)).interval == 1


def test_missing_steps_of_an_interval() -> None:
    logged = series("x", dict.fromkeys((1, 5, 10, 20, 25, 40), 0.0))
    assert [list(hole) for hole in logged.missing(1, 41)] == [[15], [30, 35]]
    assert logged.missing(1, 11) == []


def test_without() -> None:
    five = series("x", [1.0, 2.0, 3.0, 4.0, 5.0])
    assert five.without([range(1, 3), range(5, 9)]).steps == (3, 4)
    assert five.without([range(7, 9)]) is five


def test_cut_ranges() -> None:
    assert cut_ranges([range(1, 10)], [range(1, 3), range(5, 6)]) == [range(3, 5), range(6, 10)]
    assert cut_ranges([range(5, 30, 5)], [range(9, 11)]) == [range(5, 10, 5), range(15, 30, 5)]
    assert cut_ranges([range(3, 5)], [range(1, 9)]) == []


def test_descriptions_are_short() -> None:
    assert describe_steps([1, 2, 3, 7]) == "1-3, 7"
    assert describe_ranges([range(5, 30, 5)]) == "5-25 by 5"
    assert describe_steps(range(1, 20_000, 2)) == "1, 3, 5, 7, 9, 11, 13, 15, … (10000 in all, up to 19999)"
    assert step_ranges([]) == []
