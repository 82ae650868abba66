# SPDX-License-Identifier: Apache-2.0
"""Charts as plain geometry, which the template turns into inline SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_suite.report.page.axis import Axis, Tick, bounds_text, value_range, widened
from lora_suite.report.words import count, figure

# The size of a chart in CSS px: as drawn on a phone, where text must not be scaled down.
WIDTH = 350
# Style of steps that statistics left out.
TRIMMED = "trimmed"
HEIGHT = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 34
# Room for the name of the y axis above it.
_NAMED_TOP = 22
_ROW = 24
# Beyond this a number is no measurement, and arithmetic on it may overflow.
MOST = 1e100
# Steps and seconds are further apart than this, or they are one.
_LEAST_LENGTH = 1e-6
_NAME_WIDTH = 122
_FIGURE_WIDTH = 60


@dataclass(frozen=True)
class Curve:
    """Values in a chart: a line, or dots.

    style: CSS class that colours it. labels: of each point, where its x alone does not tell what it is.
    """

    name: str
    style: str
    at: Sequence[float]
    values: Sequence[float]
    dots: bool = False
    labels: Sequence[str] = ()

    @property
    def hollow(self) -> bool:
        """Whether the dots are rings: what was left out of the statistics."""
        return self.dots and self.style.startswith(TRIMMED)


@dataclass(frozen=True)
class Rule:
    """A line across a chart (x1, y1 to x2, y2 in px) with its name in the legend."""

    name: str
    style: str
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True)
class Bar:
    """A bar of a waterfall: from x, so wide (px), in the row whose upper edge is y."""

    style: str
    x: float
    y: float
    width: float
    name: str
    figure: str


@dataclass(frozen=True)
class Drawn:
    """A curve as an SVG path in px, and its values and labels as text in the order of its points."""

    curve: Curve
    path: str
    at: str
    values: str
    labels: str


@dataclass(frozen=True)
class Chart:
    """One figure: title, axes, what is drawn, and the same in words for those who do not see it."""

    title: str
    height: int
    x: Axis
    y: Axis
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    curves: list[Drawn] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    note: str = ""
    description: str = ""

    @property
    def top(self) -> float:
        """Upper edge of the drawing area, px."""
        return min(self.y.start, self.y.end)

    @property
    def bottom(self) -> float:
        """Lower edge of the drawing area, px."""
        return max(self.y.start, self.y.end)

    @property
    def legend(self) -> list[tuple[str, str, bool]]:
        """(name, style, dots) of everything that is drawn, each name once."""
        entries = [(each.curve.name, each.curve.style, each.curve.dots) for each in self.curves]
        entries += [(rule.name, rule.style, False) for rule in self.rules]
        return [entry for entry in dict.fromkeys(entries) if entry[0]]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    curves: Sequence[Curve],
    *,
    levels: Sequence[tuple[str, str, float]] = (),
    marks: Sequence[tuple[str, str, float]] = (),
    note: str = "",
    height: int = HEIGHT,
) -> Chart | None:
    """Curves over steps or seconds; None where there is nothing to draw.

    levels, marks: name, style and value of lines across at a y and at an x; those beyond the axis are left
    out.
    """
    curves = [whole for curve in curves if (whole := _drawable(curve)).values]
    if not curves:
        return None
    every_x = [value for curve in curves for value in curve.at]
    low, high = value_range([curve.values for curve in curves])
    first, last = min(every_x), max(every_x)
    if last - first < _LEAST_LENGTH:
        first, last = widened(first, last, 0.0)
    x = Axis(x_label, first, last, _LEFT, WIDTH - _RIGHT)
    y = Axis(y_label, low, high, height - _BOTTOM, _NAMED_TOP if y_label else _TOP)
    rules = [
        Rule(name, style, x.start, y(value), x.end, y(value))
        for name, style, value in levels
        if y.holds(value)
    ]
    rules += [
        Rule(name, style, x(value), y.start, x(value), y.end)
        for name, style, value in marks
        if x.holds(value)
    ]
    return _chart(title, height, x, y, curves, rules, note)


def scatter_chart(
    title: str, x_label: str, y_label: str, curves: Sequence[Curve], limit: float | None
) -> Chart | None:
    """Dots of one arm against the other on equal axes, with the lines y = x and y = limit · x.

    Steps that were left out do not shape the axes.
    """
    curves = [whole for curve in curves if (whole := _drawable(curve)).values]
    shaping = [curve for curve in curves if not curve.hollow]
    if not shaping:
        return None
    low, high = value_range([values for curve in shaping for values in (curve.at, curve.values)])
    least = min(value for curve in shaping for values in (curve.at, curve.values) for value in values)
    low = max(low, min(least, 0.0))
    height = 240
    x = Axis(x_label, low, high, _LEFT, WIDTH - _RIGHT)
    y = Axis(y_label, low, high, height - _BOTTOM, _NAMED_TOP if y_label else _TOP)
    slopes = [("equal (y = x)", "equal", 1.0)]
    if limit is not None and limit != 1.0:
        slopes.append((f"limit (y = {limit:g} x)", "limit", limit))
    rules = [rule for slope in slopes if (rule := _slope(*slope, x, y)) is not None]
    hidden = [name for name, _, _ in slopes if name not in {rule.name for rule in rules}]
    note = "".join(f"The {name.replace(' (', ' line (')} lies beyond these axes. " for name in hidden)
    return _chart(title, height, x, y, curves, rules, note.strip())


def effect_chart(
    title: str, estimate: float, low: float, high: float, ratios: Sequence[float], limit: float | None
) -> Chart | None:
    """An interval, its estimate and the repeats on a logarithmic axis, with the limit and 1.

    Only what lies within a factor of ten of the estimate or the limit is drawn to scale. None where nothing
    is positive.
    """
    anchors = [value for value in (estimate, limit, *ratios) if value is not None and 1 / MOST < value < MOST]
    if not anchors:
        return None
    least, most = min(anchors), max(anchors)
    first, last = min(max(low, least / 10), least), max(min(high, most * 10), most)
    margin = max((last / first) ** 0.08, 1.002)
    height = 92
    x = Axis("ratio", first / margin, last * margin, 14, WIDTH - 14, log=True)
    y = Axis("", 0.0, 3.0, height - _BOTTOM, _TOP)
    curves = [
        Curve("interval", "a0", [low, high], [2.0, 2.0]),
        Curve("estimate", "a0", [estimate], [2.0], dots=True),
        Curve("repeats", "a1", ratios, [0.8] * len(ratios), dots=True),
    ]
    verticals = [("equal", "equal", 1.0)]
    if limit is not None:
        verticals.append((f"limit {limit:g}", "limit", limit))
    rules = [Rule(name, style, x(at), y.start, x(at), y.end) for name, style, at in verticals if x.holds(at)]
    beyond = "The interval reaches beyond the axis." if low < x.first or high > x.last else ""
    description = f"{title}: {estimate:.4f}, interval {low:.4f} to {high:.4f}"
    drawn = [_drawn(curve, x, y) for curve in curves if curve.values]
    return Chart(title, height, x, y, x.ticks(5), [], drawn, rules, note=beyond, description=description)


def waterfall_chart(
    title: str, before: str, after: str, phases: Sequence[tuple[str, float, float]]
) -> Chart | None:
    """From the step of `before` to that of `after`, phase by phase: (name, before, after) in seconds.

    The deltas sum to the difference of the two totals, because the totals are the phases' sums.
    """
    phases = [phase for phase in phases if max(abs(phase[1]), abs(phase[2])) < MOST]
    if not phases:
        return None
    start, end = sum(phase[1] for phase in phases), sum(phase[2] for phase in phases)
    deltas = [(name, right - left) for name, left, right in phases]
    levels = list(itertools.accumulate((delta for _, delta in deltas), initial=start))
    most = max([*levels, end, 0.0])
    height = _ROW * (len(deltas) + 2) + _TOP + _BOTTOM
    x = Axis("s", 0.0, most * 1.02 or 1.0, _NAME_WIDTH, WIDTH - _FIGURE_WIDTH)
    y = Axis("", 0.0, float(len(deltas) + 2), height - _BOTTOM, _TOP)
    bars = [Bar("total", x(0), _TOP, x(start) - x(0), before, f"{figure(start)} s")]
    for row, (name, delta) in enumerate(deltas, start=1):
        left, right = sorted((levels[row - 1], levels[row]))
        style = "slower" if delta > 0 else "faster"
        width = max(x(right) - x(left), 1.0)
        bars.append(Bar(style, x(left), _TOP + _ROW * row, round(width, 1), name, _delta(delta, most)))
    last_row = _TOP + _ROW * (len(deltas) + 1)
    bars.append(Bar("total", x(0), last_row, x(end) - x(0), after, f"{figure(end)} s"))
    told = ", ".join(f"{name} {_delta(delta, most)} s" for name, delta in deltas)
    description = f"{title}: {before} {figure(start)} s, {told}, {after} {figure(end)} s"
    return Chart(title, height, x, y, x.ticks(3), [], bars=bars, description=description)


def _delta(delta: float, whole: float) -> str:
    """A difference to a thousandth of the whole's leading digit, so that what is nothing reads as nothing."""
    places = max(0, 3 - math.floor(math.log10(whole))) if whole > 0 else 0
    return f"{round(delta, places) + 0.0:+.{places}f}"


def _slope(name: str, style: str, slope: float, x: Axis, y: Axis) -> Rule | None:
    """The part of y = slope · x that lies within equal axes, None where none does."""
    if slope <= 0:
        return None
    first, last = max(x.first, y.first / slope), min(x.last, y.last / slope)
    if first >= last:
        return None
    return Rule(name, style, x(first), y(slope * first), x(last), y(slope * last))


def _chart(
    title: str,
    height: int,
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    rules: list[Rule],
    note: str = "",
) -> Chart:
    names = ", ".join(dict.fromkeys(curve.name for curve in curves if curve.name))
    description = f"{title}: {bounds_text(x)}, {bounds_text(y)}" + (f"; {names}" if names else "")
    drawn = [_drawn(curve, x, y) for curve in curves]
    beyond = sum(
        not (x.holds(at) and y.holds(value))
        for curve in curves
        if not curve.hollow
        for at, value in zip(curve.at, curve.values, strict=False)
    )
    if beyond:
        note = f"{note} {count(beyond, 'value')} beyond the axes, drawn at the edge.".strip()
    return Chart(
        title, height, x, y, x.ticks(4), y.ticks(4), drawn, rules, note=note, description=description
    )


def _drawable(curve: Curve) -> Curve:
    """The curve less the points that are no measurements, its labels fit to stand in one text."""
    labels = [label.replace("|", "/") for label in curve.labels] or [""] * len(curve.at)
    points = [
        (at, value, label)
        for at, value, label in zip(curve.at, curve.values, labels, strict=False)
        if abs(at) < MOST and abs(value) < MOST
    ]
    at, values, shown = zip(*points, strict=True) if points else ((), (), ())
    return replace(curve, at=at, values=values, labels=shown if curve.labels else ())


def _drawn(curve: Curve, x: Axis, y: Axis) -> Drawn:
    places = [f"{x(at):g},{y(value):g}" for at, value in zip(curve.at, curve.values, strict=True)]
    return Drawn(
        curve,
        # A dot is a stroke of no length with round ends: one element for all, however many.
        "".join(f"M{place}h0" for place in places) if curve.dots else "M" + " ".join(places),
        " ".join(f"{at:.6g}" for at in curve.at),
        " ".join(f"{value:.6g}" for value in curve.values),
        "|".join(curve.labels),
    )
