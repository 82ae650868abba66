# SPDX-License-Identifier: Apache-2.0
"""Charts: what is drawn where, and what is left out."""

from __future__ import annotations

import math

import pytest

from lora_suite.report.page.charts import (
    TRIMMED,
    WIDTH,
    Curve,
    effect_chart,
    line_chart,
    scatter_chart,
    waterfall_chart,
)


def places(path: str) -> list[tuple[float, float]]:
    """The points of a path, in px."""
    words = path.replace("M", " ").replace("h0", " ").split()
    return [(float(x), float(y)) for x, y in (word.split(",") for word in words)]


class TestLines:
    """Curves over steps."""

    def test_values_rise_upwards_from_left_to_right(self):
        chart = line_chart("t", "step", "s", [Curve("a", "a0", [1, 2, 3], [1.0, 2.0, 3.0])])
        (x1, y1), (x2, y2), (x3, y3) = places(chart.curves[0].path)
        assert x1 < x2 < x3
        assert y1 > y2 > y3
        assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
        assert (chart.curves[0].at, chart.curves[0].values) == ("1 2 3", "1 2 3")

    def test_nothing_to_draw_is_no_chart(self):
        assert line_chart("t", "step", "", []) is None
        assert line_chart("t", "step", "", [Curve("a", "a0", [], [])]) is None

    def test_a_level_beyond_the_axis_is_left_out(self):
        curve = Curve("a", "a0", [1, 2], [1.0, 1.1])
        levels = [("near", "limit", 1.05), ("far", "limit", 9.0)]
        chart = line_chart("t", "step", "", [curve], levels=levels, marks=[("change", "limit", 1.5)])
        assert [rule.name for rule in chart.rules] == ["near", "change"]
        assert chart.rules[0].y1 == chart.rules[0].y2
        assert chart.rules[1].x1 == chart.rules[1].x2

    def test_a_value_at_the_edge_is_told(self):
        values = [1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 30.0]
        chart = line_chart("t", "step", "", [Curve("a", "a0", range(7), values)])
        assert chart.note == "1 value beyond the axes, drawn at the edge."
        assert chart.curves[0].values.endswith(" 30")
        assert places(chart.curves[0].path)[-1][1] == chart.top

    def test_what_is_not_finite_is_not_drawn(self):
        curve = Curve("a", "a0", [1, 2, 3], [1.0, math.nan, 2.0], labels=["x", "y", "z|z"])
        chart = line_chart("t", "step", "", [curve])
        assert (chart.curves[0].at, chart.curves[0].labels) == ("1 3", "x|z/z")

    def test_one_point_alone(self):
        chart = line_chart("t", "step", "", [Curve("a", "a0", [7], [0.0])])
        assert len(places(chart.curves[0].path)) == 1

    def test_the_legend_names_each_curve_once(self):
        curves = [Curve("a", "a0", [1, 2], [1, 2]), Curve("a", "a0", [1, 2], [2, 3])]
        chart = line_chart("t", "step", "", curves, levels=[("limit 2", "limit", 2.0)])
        assert chart.legend == [("a", "a0", False), ("limit 2", "limit", False)]


class TestScatter:
    """One arm against the other."""

    def chart(self, limit: float | None, trimmed: float = 50.0):
        dots = [
            Curve("repeat 1", "r0", [1.0, 1.2, 1.4], [1.1, 1.3, 1.5], dots=True),
            Curve("left out", TRIMMED, [trimmed], [trimmed], dots=True),
        ]
        return scatter_chart("t", "full", "lora", dots, limit)

    def test_both_axes_are_equal(self):
        chart = self.chart(None)
        assert (chart.x.first, chart.x.last) == (chart.y.first, chart.y.last)

    def test_the_limit_is_a_line_through_the_origin(self):
        chart = self.chart(1.05)
        equal, limit = chart.rules
        assert (equal.name, limit.name) == ("equal (y = x)", "limit (y = 1.05 x)")
        assert (equal.x1, equal.y1) == (chart.x.start, chart.y.start)
        assert (equal.x2, equal.y2) == (chart.x.end, chart.y.end)
        # Where it leaves the drawing, y is 1.05 times x.
        span = chart.x.last - chart.x.first
        at = chart.x.first + (limit.x2 - chart.x.start) / (chart.x.end - chart.x.start) * span
        assert at * 1.05 == pytest.approx(chart.y.last, rel=1e-3)

    def test_a_limit_beyond_the_axes_is_told(self):
        chart = self.chart(3.0)
        assert [rule.name for rule in chart.rules] == ["equal (y = x)"]
        assert chart.note == "The limit line (y = 3 x) lies beyond these axes."

    @pytest.mark.parametrize("limit", [0.0, -1.0])
    def test_a_limit_that_no_ratio_reaches_is_no_line(self, limit):
        assert [rule.name for rule in self.chart(limit).rules] == ["equal (y = x)"]

    def test_a_limit_of_one_is_the_line_of_equality(self):
        assert [rule.name for rule in self.chart(1.0).rules] == ["equal (y = x)"]

    def test_steps_that_were_left_out_do_not_shape_the_axes(self):
        chart = self.chart(None)
        assert chart.x.last < 2.0
        assert places(chart.curves[1].path) == [(chart.x.end, chart.y.end)]
        assert not chart.note
        assert scatter_chart("t", "x", "y", [Curve("left out", TRIMMED, [1], [1], dots=True)], None) is None


class TestEffect:
    """An interval and its limit."""

    def test_in_order_from_left_to_right(self):
        chart = effect_chart("t", 0.9, 0.85, 0.95, [0.88, 0.92], 0.8)
        interval, estimate, repeats = (places(each.path) for each in chart.curves)
        limit = next(rule.x1 for rule in chart.rules if rule.style == "limit")
        assert limit < interval[0][0] < repeats[0][0] < estimate[0][0] < repeats[1][0] < interval[1][0]
        assert all(0 < x < WIDTH for x, _ in [*interval, *estimate, *repeats])
        assert chart.note == ""

    def test_an_interval_without_end_stays_readable(self):
        chart = effect_chart("t", 0.85, 0.0, 267901.4, [], 2.0)
        assert chart.x.last < 50
        assert chart.note == "The interval reaches beyond the axis."
        assert [rule.style for rule in chart.rules] == ["equal", "limit"]

    def test_without_a_limit(self):
        chart = effect_chart("t", 1.0, 1.0, 1.0, [1.0], None)
        assert [rule.style for rule in chart.rules] == ["equal"]


class TestWaterfall:
    """Phases between two totals."""

    PHASES = (("data", 1.0, 1.0), ("forward", 6.0, 5.0), ("optimizer", 3.0, 5.5))

    def test_the_deltas_lead_from_one_total_to_the_other(self):
        chart = waterfall_chart("t", "full", "lora", self.PHASES)
        start, data, forward, optimizer, end = chart.bars
        assert (start.name, start.figure, end.name, end.figure) == ("full", "10 s", "lora", "11.5 s")
        assert [bar.figure for bar in (data, forward, optimizer)] == ["+0.00", "-1.00", "+2.50"]
        assert [bar.style for bar in (forward, optimizer)] == ["faster", "slower"]
        # Forward ends where optimizer begins, and optimizer ends where the total of lora does.
        assert forward.x == pytest.approx(optimizer.x, abs=0.11)
        assert optimizer.x + optimizer.width == pytest.approx(end.x + end.width, abs=0.2)
        assert forward.x + forward.width == pytest.approx(start.x + start.width, abs=0.2)

    def test_in_words(self):
        chart = waterfall_chart("Phases", "full", "lora", self.PHASES)
        assert (
            chart.description
            == "Phases: full 10 s, data +0.00 s, forward -1.00 s, optimizer +2.50 s, lora 11.5 s"
        )

    def test_a_phase_that_takes_nothing_reads_as_nothing(self):
        chart = waterfall_chart("t", "a", "b", [("data", 3e-6, 1e-6), ("forward", 0.12, 0.1455)])
        assert [bar.figure for bar in chart.bars[1:3]] == ["+0.0000", "+0.0255"]

    def test_nothing_is_no_chart(self):
        assert waterfall_chart("t", "a", "b", []) is None

    def test_phases_that_take_no_time(self):
        assert len(waterfall_chart("t", "a", "b", [("data", 0.0, 0.0)]).bars) == 3
