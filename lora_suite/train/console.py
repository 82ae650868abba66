# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a running training: a progress bar, or a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from lora_suite.launch.progress import Progress

_SECONDS_BETWEEN_LINES = 10.0


class Console:
    """Shows step, loss and time left: a bar on a terminal, else lines (the first, the last, some between)."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._last_line = float("-inf")

    def show(self, progress: Progress) -> None:
        """Show one look at the training."""
        if sys.stdout.isatty():
            self._show_bar(progress)
            return
        now = time.monotonic()
        if progress.step < progress.steps and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        print(f"step {progress.step}/{progress.steps}  {describe(progress)}", flush=True)

    def close(self) -> None:
        """Take the bar away, so that later output starts on a clean line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, progress: Progress) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns)
            self._task = self._bar.add_task("", total=progress.steps)
            self._bar.start()
        self._bar.update(self._task, completed=progress.step, description=describe(progress))


def describe(progress: Progress) -> str:
    """Loss and time left in words."""
    loss = "loss not finite" if progress.loss is None else f"loss {progress.loss:.4f}"
    if progress.seconds_left is None:
        return loss
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    return f"{loss}  {minutes}:{seconds:02d} left"
