# SPDX-License-Identifier: Apache-2.0
"""One metric's values by step: windows over them, what is missing, what is not finite.

Steps are 1-based training steps, except under `ray/`, where the key is whole seconds since the monitor
started.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

# Sampled by the clock or written now and then, so that a step without a value is no loss of data.
_CLOCK_KEYED = "ray/"
_OCCASIONAL_PREFIXES = ("validation/", "timing/validation/", _CLOCK_KEYED)
_OCCASIONAL = frozenset({"timing/train/validation", "timing/train/checkpointing"})

# Fewer steps than this on a common multiple are taken for a damaged per-step series, not for an interval.
_INTERVAL_EVIDENCE = 5
_SHOWN_RANGES = 8


def is_per_step(name: str) -> bool:
    """Whether the metric has one value for every step of the run, so that a hole in it is lost data."""
    return name not in _OCCASIONAL and not name.startswith(_OCCASIONAL_PREFIXES)


def is_keyed_by_step(name: str) -> bool:
    """Whether the metric's keys are training steps; under `ray/` they are seconds."""
    return not name.startswith(_CLOCK_KEYED)


def matches(name: str, pattern: str) -> bool:
    """Whether a metric is meant by a name or a glob; a name that holds glob characters still means itself."""
    return name == pattern or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class Series:
    """A metric's values in ascending step order; a value that was null in the file is nan."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @cached_property
    def finite(self) -> bool:
        """Whether every value is a finite number (True for an empty series)."""
        return all(map(math.isfinite, self.values))

    @cached_property
    def interval(self) -> int:
        """Steps between two values: 1, or k where the series is logged at every k-th step.

        Trainers with a logging interval write step 1 and then the multiples of k, so the first step is not
        asked.
        """
        if len(self.steps) < _INTERVAL_EVIDENCE:
            return 1
        return math.gcd(*self.steps[1:])

    def at(self, step: int) -> float | None:
        """Value of one step, None where the series has no such step."""
        index = bisect_left(self.steps, step)
        found = index < len(self.steps) and self.steps[index] == step
        return self.values[index] if found else None

    def bounds(self, range_start: int | None = None, range_end: int = 0) -> tuple[int, int]:
        """First step and end (exclusive) of a window, by step number, as the field's checker counts.

        A negative start and a non-positive end count from the last step: `(-6, -1)` is the five steps before
        the last one, `(2, 0)` everything from step 2 on. None starts at the first recorded step. The series
        must not be empty.
        """
        after_last = self.steps[-1] + 1
        start = self.steps[0] if range_start is None else range_start
        return (
            start + after_last if start < 0 else start,
            range_end + after_last if range_end <= 0 else range_end,
        )

    def window(self, range_start: int | None = None, range_end: int = 0) -> "Series":
        """The part of the series inside `bounds(range_start, range_end)`; may be empty."""
        if not self.steps:
            return self
        start, end = self.bounds(range_start, range_end)
        first, stop = bisect_left(self.steps, start), bisect_left(self.steps, end)
        if first == 0 and stop == len(self.steps):
            return self
        return Series(self.name, self.steps[first:stop], self.values[first:stop])

    def without(self, cuts: Iterable[range]) -> "Series":
        """The series less the steps that lie in one of the (ascending, step 1) ranges."""
        keep = [True] * len(self.steps)
        for cut in cuts:
            first, stop = bisect_left(self.steps, cut.start), bisect_left(self.steps, cut.stop)
            keep[first:stop] = [False] * max(0, stop - first)
        return self._where(keep)

    def finite_part(self) -> "Series":
        """The series less its non-finite values."""
        return self._where([math.isfinite(value) for value in self.values])

    def nonfinite_steps(self) -> tuple[int, ...]:
        """Steps whose value is null, NaN or an infinity."""
        return tuple(
            step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)
        )

    def missing(self, start: int, end: int) -> list[range]:
        """Runs of steps in [start, end) that a per-step series should have and this one has not."""
        first, stop = bisect_left(self.steps, start), bisect_left(self.steps, end)
        if stop - first == end - start:
            return []
        grid = range(-(-start // self.interval) * self.interval, end, self.interval)
        present = [step for step in self.steps[first:stop] if step % self.interval == 0]
        holes = []
        expected = grid.start
        for step in (*present, grid.start + len(grid) * self.interval):
            if step > expected:
                holes.append(range(expected, step, self.interval))
            expected = step + self.interval
        return holes

    def _where(self, keep: Sequence[bool]) -> "Series":
        if all(keep):
            return self
        return Series(
            self.name,
            tuple(step for step, kept in zip(self.steps, keep, strict=True) if kept),
            tuple(value for value, kept in zip(self.values, keep, strict=True) if kept),
        )


def cut_ranges(ranges: Iterable[range], cuts: Iterable[range]) -> list[range]:
    """The ranges less every step that lies in one of the cuts."""
    pieces = list(ranges)
    for cut in cuts:
        pieces = [
            part
            for piece in pieces
            for part in (piece[: bisect_left(piece, cut.start)], piece[bisect_left(piece, cut.stop) :])
            if part
        ]
    return pieces


def step_ranges(steps: Iterable[int]) -> list[range]:
    """Ascending steps as runs of consecutive numbers."""
    runs: list[range] = []
    for step in steps:
        if runs and runs[-1].stop == step:
            runs[-1] = range(runs[-1].start, step + 1)
        else:
            runs.append(range(step, step + 1))
    return runs


def describe_ranges(ranges: Sequence[range]) -> str:
    """Runs of steps for a message: `2-4, 9`, with a count in place of the tail of a long list."""
    texts = [_describe_range(run) for run in ranges[:_SHOWN_RANGES]]
    if len(ranges) > _SHOWN_RANGES:
        texts.append(f"… ({sum(map(len, ranges))} in all, up to {ranges[-1][-1]})")
    return ", ".join(texts)


def describe_steps(steps: Iterable[int]) -> str:
    """Ascending steps for a message, as `describe_ranges` words them."""
    return describe_ranges(step_ranges(steps))


def _describe_range(run: range) -> str:
    if len(run) == 1:
        return str(run[0])
    every = f" by {run.step}" if run.step > 1 else ""
    return f"{run[0]}-{run[-1]}{every}"
