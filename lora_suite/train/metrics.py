# SPDX-License-Identifier: Apache-2.0
"""One writer of metrics: every value goes through it once, and from it to every sink."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol


class Sink(Protocol):
    """Where metrics go. A sink sees finite numbers alone; None stands for a value that was not finite."""

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take the values of one step; may keep them in memory."""
        ...

    def flush(self) -> None:
        """Make everything taken so far readable for others."""
        ...

    def close(self) -> None:
        """Flush and let go of files."""
        ...


class MetricsWriter:
    """Hands each value to all sinks, and remembers which ones were not finite.

    nonfinite: per metric, the steps whose value was NaN or infinite.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.nonfinite: dict[str, list[int]] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step."""
        checked: dict[str, float | None] = {}
        for name, value in values.items():
            if math.isfinite(value):
                checked[name] = value
            else:
                checked[name] = None
                self.nonfinite.setdefault(name, []).append(step)
        for sink in self._sinks:
            sink.log(step, checked)

    def flush(self) -> None:
        """Make everything taken so far readable for others."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Flush and close every sink."""
        for sink in self._sinks:
            sink.close()
