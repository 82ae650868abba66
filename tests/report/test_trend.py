# SPDX-License-Identifier: Apache-2.0
"""A series of nights on a terminal."""

from __future__ import annotations

import io
from datetime import date

from rich.console import Console

from lora_suite.history.answers import FalseAlarms
from lora_suite.history.trend import judge_series
from lora_suite.report.trend import chart, render
from tests.history.helpers import noisy, series

STEP = [*noisy(30), *noisy(10, seed=2, level=0.105)]


def rendered(values, encoding="utf-8"):
    """What is printed of a series to a file of that encoding."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, newline="\n") as stream:
        trend = judge_series(series(values), today=date(2026, 3, 1))
        render(trend, FalseAlarms(1, 4), Console(file=stream, width=80), 20)
        stream.flush()
        return raw.getvalue().decode(encoding)


def test_a_value_is_a_dot_at_its_height():
    assert list(chart([1.0, 9.0, 5.0], ["a", "b", "c"])) == [
        "9 ┤ b",
        "8 ┤",
        "7 ┤",
        "6 ┤",
        "5 ┤  c",
        "4 ┤",
        "3 ┤",
        "2 ┤",
        "1 ┤a",
    ]


def test_equal_values_are_one_row():
    assert list(chart([2.5, 2.5], ["●", "●"])) == ["2.5 ┤●●"]


def test_the_last_nights_are_drawn_with_the_change_and_tonights_answer():
    said = rendered(STEP)
    assert "20 of 40 nights" in said
    assert said.count("▲") == 1
    assert "levels, cusum  c0029..c0030" in said
    assert "of 4 alerts answered so far, 1 were noise (25 %)" in said
    assert said.splitlines()[-1].startswith("first bad: 2026-01-31T03:00:00+00:00 run run-30; last good: ")


def test_a_quiet_series_says_so():
    assert rendered(noisy(20)).splitlines()[-1] == "PASS tonight is within what was accepted"


def test_a_stream_that_lacks_the_characters_gets_lookalikes():
    said = rendered(STEP, "ascii")
    assert "^" in said
    assert "?" not in said
