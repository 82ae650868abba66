# SPDX-License-Identifier: Apache-2.0
"""What is shown while a suite runs: a live line on a terminal, one line a finished run anywhere else."""

from __future__ import annotations

import contextlib
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from lora_suite.judge.verdict import RunVerdict
from lora_suite.launch.progress import Progress as Look
from lora_suite.plan.model import BaseCase, PlannedRun
from lora_suite.report.terminal import STYLES

_NAME_WIDTH = 38
WARMUP = "warm-up"
"""What stands in place of the number of a run that is discarded."""


class LiveView:
    """Shows run i of n, its case, step, loss, its time left and the suite's. Use as a context manager.

    at_most: the suite may end with fewer runs than `runs`.
    """

    def __init__(self, console: Console, runs: int, *, at_most: bool = False) -> None:
        self._console = console
        self._runs = f"≤{runs}" if at_most else f"{runs}"
        self._left = ""
        self._number = 0
        self._bar = Progress(
            TextColumn("{task.fields[place]}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[look]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, place="", look="")

    def __enter__(self) -> LiveView:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()

    def begin(self, planned: PlannedRun, case: BaseCase, seconds_left: float | None = None) -> None:
        """Show that the next run has started; with it and those after it so many seconds are left."""
        self._number += 1
        self._left = f", suite {_minutes(seconds_left)}" if seconds_left is not None else ""
        place = f"{self._number}/{self._runs} {planned.case} {planned.repeat or WARMUP}"
        self._bar.reset(self._task, total=case.steps, place=place, look="starting")

    def look(self, look: Look | None, last_line: str) -> None:
        """Show where the run is; before its first step, the last line of its log."""
        if look is None or look.step == 0:
            self._bar.update(self._task, look=last_line[-_NAME_WIDTH:])
            return
        self._bar.update(self._task, completed=look.step, total=look.steps, look=_words(look) + self._left)

    def end(self, verdict: RunVerdict) -> None:
        """Leave one line of a finished run behind."""
        seconds = f" {verdict.seconds:.0f} s" if verdict.seconds is not None else ""
        line = Text.assemble(
            f"{self._number}/{self._runs} ",
            (verdict.state, STYLES[verdict.state]),
            f" {verdict.case} {verdict.repeat or WARMUP}: ",
            f"{verdict.steps_done}/{verdict.steps_planned} steps{seconds}",
        )
        first = verdict.message.partition("\n")[0]
        if first:
            line.append(f": {first}")
        # The suite goes on where nobody watches any more: a closed pipe, a lost terminal.
        with contextlib.suppress(OSError):
            self._console.print(line, highlight=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


def _words(look: Look) -> str:
    loss = f" loss {look.loss:.3f}" if look.loss is not None else ""
    left = f" {look.seconds_left:.0f} s left" if look.seconds_left is not None else ""
    return f"step {look.step}/{look.steps}{loss}{left}"
