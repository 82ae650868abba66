# SPDX-License-Identifier: Apache-2.0
"""Axes: where values lie, which ticks they get, which values shape them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_suite.report.page.axis import Axis, round_step, value_range, widened

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


def texts(first: float, last: float, count: int = 4, *, log: bool = False) -> list[str]:
    """The texts of an axis' ticks."""
    return [tick.text for tick in Axis("", first, last, 0, 100, log).ticks(count)]


def test_positions():
    axis = Axis("s", 10.0, 20.0, 100, 0)
    assert [axis(value) for value in (10.0, 15.0, 20.0)] == [100, 50, 0]
    assert [axis(value) for value in (-5.0, 99.0)] == [100, 0]
    assert [axis.holds(value) for value in (9.99, 10.0, 20.0, 20.01)] == [False, True, True, False]


def test_on_a_logarithmic_axis_equal_ratios_take_equal_lengths():
    axis = Axis("ratio", 0.5, 2.0, 0, 100, log=True)
    assert [axis(value) for value in (0.5, 1.0, 2.0)] == [0, 50, 100]


@pytest.mark.parametrize(("step", "rounded"), [(0.11, 0.2), (0.2, 0.2), (3.0, 5.0), (7.0, 10.0), (1.0, 1.0)])
def test_round_steps(step, rounded):
    assert round_step(step) == pytest.approx(rounded)


def test_ticks_are_round():
    assert texts(0.0, 1.0) == ["0.0", "0.5", "1.0"]
    assert texts(0.2483, 0.3519) == ["0.25", "0.30", "0.35"]
    assert texts(1, 50) == ["20", "40"]
    assert texts(2e9, 6e9) == ["2e+09", "3e+09", "4e+09", "5e+09", "6e+09"]


def test_a_long_logarithmic_axis_has_powers_of_ten():
    assert texts(0.05, 30, 5, log=True) == ["0.1", "1", "10"]
    assert texts(0.8, 4, 5, log=True) == ["1", "2"]
    assert texts(0.84, 0.86, 4, log=True) == ["0.840", "0.845", "0.850", "0.855", "0.860"]


@given(FINITE, st.floats(min_value=1e-9, max_value=1e12))
def test_ticks_lie_on_the_axis_and_are_few(first, length):
    # As long, against its values, as `widened` makes it.
    first, last = widened(first, first + length, 0.0)
    ticks = Axis("", first, last, 0, 100).ticks(4)
    assert 1 <= len(ticks) <= 6
    assert all(0 <= tick.position <= 100 for tick in ticks)


def test_a_value_far_beyond_the_others_does_not_shape_the_axis():
    low, high = value_range([[1.0, 1.01, 1.02, 0.99, 1.0, 1.01, 20.0]])
    assert low < 0.99
    assert 1.02 < high < 1.3


def test_each_group_is_shown_however_far_apart_they_are():
    low, high = value_range([[1.0, 1.01, 1.02, 1.0], [9.0, 9.01, 9.02, 9.0]])
    assert low < 1.0
    assert high > 9.02


@given(st.lists(st.lists(FINITE, max_size=20), min_size=1).filter(any))
def test_the_range_is_never_empty(groups):
    low, high = value_range(groups)
    assert low < high
