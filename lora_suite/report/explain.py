# SPDX-License-Identifier: Apache-2.0
"""An explanation as tables for a terminal: what made the difference comes first.

On a terminal names give way where the width is short. Anywhere else, as in a log file, settings are whole;
kernels, whose names can be of any length, keep to the console's width there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_suite.judge.explain.model import OTHER, Calls, Compared, Explanation, Part, Unlike
from lora_suite.report.kernel_names import short

# Width that no table reaches.
_UNLIMITED = 10_000
_KERNELS = 8
_UNLIKE = 16
# Phases that the headline names: as many as make most of the change, or so many.
_MOST, _NAMED = 0.8, 3
# Kernels below this share of the change are no explanation.
_SMALL_SHARE = 0.005
# A name of this length is cut no further, however narrow the console.
_SHORTEST = 12


def render(explanation: Explanation, console: Console) -> None:
    """Print an explanation: headline, sides, phases, kernels, what else differs, notes."""
    width = console.width
    if not console.is_terminal:
        console.width = _UNLIMITED
    for part in _parts(explanation, width):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))
    console.width = width


def headline(explanation: Explanation) -> str:
    """One sentence: which phases made the difference, or that there is none."""
    step = explanation.step
    named: list[Part] = []
    for part in explanation.phases[:_NAMED]:
        if part.share is None or sum(each.share or 0.0 for each in named) >= _MOST:
            break
        named.append(part)
    decimals = _decimals(step)
    texts = [f"{each.phase} {_signed(each.delta, decimals)} s, {_share(each.share)}" for each in named]
    told = f"{'; '.join(texts)} of the {_word(explanation)}"
    if explanation.changed:
        return told
    if not named:
        return f"no difference to explain: the step takes {_percent(step)}"
    return f"not certain, as the step takes {_percent(step)}: {told}"


def _parts(explanation: Explanation, width: int) -> list[Table | Text]:
    parts: list[Table | Text] = [*_head(explanation), _phases(explanation)]
    for title, rows in (
        (f"Kernels, on the device: {_kernels_per_step(explanation)}", explanation.kernels),
        ("Operators, on the host, each less those that it calls, a step: ", explanation.operators),
    ):
        if rows:
            parts += [Text(""), Text(title + _sum(rows, explanation)), _calls(rows, width)]
    if explanation.unlike:
        parts += [Text(""), Text("What else is not the same"), _unlike(explanation.unlike)]
    if len(explanation.unlike) > _UNLIKE:
        parts.append(Text(f"and {len(explanation.unlike) - _UNLIKE} more, all in --json"))
    notes = [Text(f"note: {note}", style="dim") for note in explanation.notes]
    return [*parts, *([Text(""), *notes] if notes else [])]


def _head(explanation: Explanation) -> list[Text]:
    step = explanation.step
    decimals = _decimals(step)
    how = "the same steps of both" if explanation.matched else "steps not matched"
    trimmed = f", {explanation.trimmed} extreme ones left out" if explanation.trimmed else ""
    steps = f"{explanation.left.steps} and {explanation.right.steps} steps, {how}{trimmed}"
    return [
        Text(headline(explanation), style="bold"),
        Text(_side("left", explanation.left)),
        Text(_side("right", explanation.right)),
        Text(
            f"step:  {step.left:.{decimals}f} s and {step.right:.{decimals}f} s, {_percent(step)} ({steps})"
        ),
        Text(""),
    ]


def _side(name: str, side: Compared) -> str:
    first, *others = side.directories
    more = f" and {len(others)} more" if others else ""
    floor = ""
    if side.over_floor is not None:
        bound = f", bound by {side.floor_bound}" if side.floor_bound else ""
        floor = f"; {side.over_floor:.3g} × its floor{bound}"
    return f"{name + ':':6} {side.name}, {first}{more}{floor}"


def _word(explanation: Explanation) -> str:
    return "slowdown" if explanation.step.delta > 0 else "speed-up"


def _percent(step: Part) -> str:
    """The step's change, as a share of the left side's, with its interval."""
    text = f"{100 * step.delta / step.left:+.2f} %"
    if step.low is None or step.high is None:
        return text
    return f"{text} [{100 * step.low / step.left:+.2f}, {100 * step.high / step.left:+.2f}]"


def _decimals(step: Part) -> int:
    """Decimals that show a hundredth of a percent of a step."""
    return max(0, 4 - math.ceil(math.log10(max(step.left, step.right))))


def _signed(value: float, decimals: int) -> str:
    """A number with its sign, and without one where it is zero as far as it is shown."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def _share(share: float | None) -> str:
    return "" if share is None else f"{_signed(100 * share, 0).removeprefix('+')} %"


def _table(names: Sequence[str], figures: Sequence[str]) -> Table:
    """A borderless table. Only the first of the names gives way where the width is short."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(names[0], overflow="ellipsis")
    for name in names[1:]:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, no_wrap=True, justify="right")
    return table


def _phases(explanation: Explanation) -> Table:
    step = explanation.step
    decimals = _decimals(step)
    interval = ["95 % interval"] if step.low is not None else []
    table = _table(["phase"], ["left s", "right s", "difference", *interval, "share"])
    for part in (*explanation.phases, step):
        cells = [_unsigned(part.left, decimals), _unsigned(part.right, decimals)]
        cells.append(_signed(part.delta, decimals))
        if part.low is not None and part.high is not None:
            cells.append(f"[{_signed(part.low, decimals)}, {_signed(part.high, decimals)}]")
        style = {"step": "bold", OTHER: "dim"}.get(part.phase, "")
        table.add_row(Text(part.phase, no_wrap=True), *map(Text, [*cells, _share(part.share)]), style=style)
    return table


def _unsigned(value: float, decimals: int) -> str:
    return _signed(value, decimals).removeprefix("+")


def _kernels_per_step(explanation: Explanation) -> str:
    """How many kernels each side starts in a step, where both are known."""
    counts = (explanation.left.kernels_per_step, explanation.right.kernels_per_step)
    told = [f"{count:,.0f}" for count in counts if count is not None]
    return f"{' and '.join(told)} a step; " if len(told) == len(counts) else ""


def _sum(rows: Sequence[Calls], explanation: Explanation) -> str:
    """How much of the change all kernels (or operators) are, a step."""
    delta = sum(row.delta_us for row in rows)
    text = f"{round(delta):+,} µs in all"
    if explanation.step.share is not None:
        text += f", {_share(delta / (1e6 * explanation.step.delta))} of the {_word(explanation)}"
    return text


def _calls(rows: Sequence[Calls], width: int) -> Table | Text:
    """The kernels (or operators) that tell most, no wider than the console."""
    telling = [row for row in rows if row.share is None or row.share >= _SMALL_SHARE][:_KERNELS]
    if not telling:
        return Text("none of them is a part of it", style="dim")
    figures = ["left µs", "right µs", "diff", "calls", "share"]
    table = _table(["name", "phase"], figures)
    table.padding = (0, 1, 0, 0)
    cells = [[row.phase, *_figures(row)] for row in telling]
    columns = zip(["phase", *figures], *cells, strict=True)
    room = width - sum(1 + max(map(len, column)) for column in columns)
    for row, beside in zip(telling, cells, strict=True):
        table.add_row(Text(_fit(short(row.name), room), no_wrap=True), *map(Text, beside))
    return table


def _figures(row: Calls) -> list[str]:
    before, after = (f"{round(calls, 1):g}" for calls in (row.left_calls, row.right_calls))
    return [
        _microseconds(row.left_us),
        _microseconds(row.right_us),
        _signed(row.delta_us, 0),
        after if before == after else f"{before}→{after}",
        _share(row.share),
    ]


def _fit(name: str, room: int) -> str:
    """A name with its middle left out where there is no room: what kernels are for stands at either end."""
    room = max(room, _SHORTEST)
    if len(name) <= room:
        return name
    tail = (room - 1) // 2
    return f"{name[: room - 1 - tail]}…{name[-tail:]}"


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _unlike(rows: Sequence[Unlike]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("what", no_wrap=True)
    for column in ("key", "left", "right"):
        table.add_column(column, overflow="ellipsis")
    for row in rows[:_UNLIKE]:
        cells = (Text(cell, no_wrap=True) for cell in (row.key, row.left, row.right))
        table.add_row(Text(row.what), *cells)
    return table
