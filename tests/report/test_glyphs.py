# SPDX-License-Identifier: Apache-2.0
"""Drawings in one line: what they show, how wide they are, and what ASCII makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_suite.judge.verdict import Effect
from lora_suite.report.glyphs import BAR_WIDTH, NIGHTS, encodable, in_ascii, interval_bar, sparkline

RATIOS = st.floats(min_value=1e-320, max_value=1e300)


def effect(low: float, estimate: float, high: float) -> Effect:
    """An effect of which only the interval matters."""
    return Effect(estimate=estimate, low=low, high=high, confidence=0.95, repeats=4, smallest_detectable=None)


@pytest.mark.parametrize(
    ("bounds", "limit", "bar"),
    [
        # The axis is logarithmic, so 0.5, 1 and 2 are equally far apart.
        ((1.0, 1.0, 2.0), 0.5, "│    ●────┤"),
        ((0.5, 1.0, 2.0), 1.0, "├────┼────┤"),
        ((0.5, 0.5**0.5, 1.0), 2.0, "├──●──┤    │"),
        ((0.5, 1.0, 2.0), 2.0, "├────●────│"),
        ((1.0, 1.0, 1.0), 1.0, "     │     "),
    ],
)
def test_an_interval_against_its_limit(bounds, limit, bar):
    assert interval_bar(effect(*bounds), limit, width=len(bar)) == bar


@given(st.lists(RATIOS, min_size=3, max_size=3), RATIOS)
def test_the_bar_is_as_wide_as_it_says_and_shows_the_limit(bounds, limit):
    bar = interval_bar(effect(*sorted(bounds)), limit)
    assert len(bar) == BAR_WIDTH
    assert sum(bar.count(mark) for mark in "│┼") == 1


def test_the_lower_end_of_an_interval_may_be_nothing():
    assert interval_bar(effect(0.0, 1.0, 2e5), 2.0)[0] == "├"


def test_a_sparkline_goes_from_the_least_to_the_greatest():
    assert sparkline([1.0, 1.5, 2.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▄▄"
    assert sparkline([]) == ""
    assert len(sparkline(range(100))) == NIGHTS


def test_only_the_last_nights_count():
    assert sparkline([1000.0, *[1.0] * (NIGHTS - 1), 2.0]) == "▁" * (NIGHTS - 1) + "█"


def test_ascii_keeps_the_width_and_the_meaning():
    drawn = interval_bar(effect(1.0, 1.2, 2.0), 0.5) + sparkline(range(8)) + "≥ 1 … → é"
    plain = in_ascii(drawn)
    assert len(plain) == len(drawn)
    assert plain[:-1].isascii()
    assert len({in_ascii(level) for level in "▁▂▃▄▅▆▇█"}) == 8
    assert plain.endswith("> 1 ~ > é")


@pytest.mark.parametrize(
    ("encoding", "can"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("no such encoding", False)]
)
def test_encodings(encoding, can):
    assert encodable(encoding) is can
