# SPDX-License-Identifier: Apache-2.0
"""A series of nights on a terminal: a chart, its changes with their commits, and what is said of tonight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_suite.history.answers import FalseAlarms
from lora_suite.history.trend import Trend
from lora_suite.judge.verdict import ChangePoint, Night
from lora_suite.report.glyphs import encodable, in_ascii
from lora_suite.report.terminal import STYLES

CHART_ROWS = 9
_SHORT = 10
_DOT, _FIRST_BAD, _ODD = "●", "▲", "○"


def render(trend: Trend, alarms: FalseAlarms, console: Console, last: int) -> None:
    """Print a trend: headline, chart of the last nights, changes, notes, tonight's state."""
    history = trend.history(last)
    series = trend.series
    nights = f"{len(history.nights)} of {len(series.nights)} nights"
    lines = [Text(f"{series.name} {series.metric}: {nights}", style="bold")]
    lines += [Text(line) for line in chart([night.value for night in history.nights], _marks(trend, last))]
    lines.append(Text(f"{history.nights[0].started} to {history.nights[-1].started}", style="dim"))
    parts: list[Text | Table] = [*lines]
    if history.changes:
        parts.append(_changes(history.changes))
    parts += [Text(note, style="dim") for note in _notes(trend)]
    parts.append(Text(str(alarms), style="dim"))
    state = Text(trend.state, style=STYLES[trend.state])
    parts.append(Text.assemble(state, f" {trend.message or 'tonight is within what was accepted'}"))
    if trend.tonight is not None and trend.alerted:
        parts.append(Text(first_bad(trend.tonight)))
    plain = not encodable(console.encoding)
    for part in parts:
        if plain and isinstance(part, Text):
            part = Text(in_ascii(part.plain).translate(_PLAIN), style=part.style)
        console.print(part, highlight=False, soft_wrap=True)


def chart(values: Sequence[float], marks: Sequence[str]) -> Iterator[str]:
    """The values as dots, a column each, on an axis from the least to the greatest; one mark a value."""
    least, greatest = min(values), max(values)
    span = greatest - least
    rows = [round((value - least) / span * (CHART_ROWS - 1)) if span > 0 else 0 for value in values]
    labels = [f"{least + span * row / (CHART_ROWS - 1):.4g}" for row in range(CHART_ROWS)]
    width = max(map(len, labels))
    for row in range(CHART_ROWS - 1 if span > 0 else 0, -1, -1):
        dots = "".join(mark if at == row else " " for at, mark in zip(rows, marks, strict=True))
        yield f"{labels[row]:>{width}} ┤{dots}".rstrip()


def first_bad(change: ChangePoint) -> str:
    """The first bad night and the last good one, with their runs and commits."""
    return f"first bad: {_night(change.first_bad)}; last good: {_night(change.last_good)}{_range(change)}"


_PLAIN = str.maketrans("▲○", "^o")


def _night(night: Night) -> str:
    run = f" run {night.run_id}" if night.run_id else ""
    return f"{night.started}{run}"


def _range(change: ChangePoint) -> str:
    good, bad = change.last_good.code, change.first_bad.code
    return f"; commits {good}..{bad}" if good and bad else "; its commits were not recorded"


def _marks(trend: Trend, last: int) -> list[str]:
    bad = {change.at for change in trend.changes}
    odd = {at for at, signal in enumerate(trend.watched.signals) if signal and signal.detector == "chart"}
    marks = [
        _FIRST_BAD if at in bad else _ODD if at in odd else _DOT for at in range(len(trend.series.nights))
    ]
    return marks[-last:]


def _changes(changes: Sequence[ChangePoint]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("first night of the level", "change", "found by", "last good..first bad commit"):
        table.add_column(name, no_wrap=True)
    for change in changes:
        good, bad = (_short(night.code) for night in (change.last_good, change.first_bad))
        table.add_row(
            change.first_bad.started,
            f"{100 * (change.ratio - 1):+.1f} %",
            ", ".join(change.detectors),
            f"{good}..{bad}",
        )
    return table


def _short(code: str) -> str:
    """The beginning of a commit, with the mark of a changed tree."""
    return f"{code[:_SHORT]}{'+' if code.endswith('+') and len(code) > _SHORT else ''}" or "?"


def _notes(trend: Trend) -> Iterator[str]:
    elsewhere = trend.series.elsewhere
    if elsewhere:
        recipes = sum(night.version != trend.series.version for night in elsewhere)
        yield (
            f"not compared: {len(elsewhere)} nights in another environment or with another recipe "
            f"({recipes} of them with another recipe)"
        )
    if not trend.series.environment:
        yield "the environment was not recorded: whether all nights ran on one machine is not known"
    flagged = sum(night.flagged for night in trend.series.nights)
    if flagged:
        yield f"the machine was unwell in {flagged} nights; they count all the same"
    for ack in trend.answered:
        until = f" until {ack.until}" if ack.until else ""
        yield f"acknowledged as {ack.label}{until}: {ack.started} ({ack.note or 'no note'}, {ack.by})"
    for ack in trend.expired:
        yield f"no longer acknowledged, since {ack.until} is over: {ack.started} as {ack.label} ({ack.by})"
    for at in trend.watched.accepted:
        yield f"better since {trend.series.nights[at].started}, which became the reference by itself"
