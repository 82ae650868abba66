# SPDX-License-Identifier: Apache-2.0
"""Where warm-up ends: a fixed floor, then a cut that follows the step times, then a cap.

Compilation, caches and allocators make first steps slow, for as many steps as nobody knows beforehand. So of
each segment of a run (its start and each resume), on the logarithm of the step times:

1. the first max(warmup, 10 % of the segment) steps are left out;
2. the single change point that leaves the least absolute deviation from the medians on both sides is sought;
   if the level before it is more than 10 % above the level after it, and the change explains half of the
   deviation, what lies before is left out too, and the search goes on in the rest (compilation, then caches);
3. of two runs that saw the same batches, the logarithm of their ratio is treated likewise, whichever arm is
   slower at first: batches of unlike lengths hide in one run's times what they cannot hide in the ratio;
4. where more than half of the segment would have to go, the run never became steady, and nothing is said of
   its speed. Some never do: Barrett et al., "Virtual machine warmup blows hot and cold", OOPSLA 2017; Traini
   et al., Empirical Software Engineering 28, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop

from lora_suite.judge.evidence import Evidence
from lora_suite.plan.metric_names import STEP_TIME, TOTAL_STEP_TIME

FLOOR_SHARE = 0.10
CAP_SHARE = 0.50
# How much slower than what follows warm-up is, and which part of the deviation it must explain.
SLOWER = 0.10
EXPLAINED = 0.50
# Fewer values after a change are no level.
_FEWEST_AFTER = 5


class NotSteady(ValueError):
    """More than half of a segment would be warm-up; the text says which steps are slower than the rest.

    slower: by which share, below 0 where the values before the change are lower.
    """

    def __init__(self, first: int, last: int, end: int, slower: float) -> None:
        self.slower = slower
        # Of a ratio whose left side is faster at first, the right side is slower by the inverse.
        share = slower if slower > 0 else 1 / (1 + slower) - 1
        super().__init__(
            f"steps {first}-{last} of {end} take {100 * share:.0f} % longer than the rest, "
            f"so more than half of the run would be warm-up"
        )


@dataclass(frozen=True)
class Warmup:
    """Steps to leave out: `floor` of every run alike, `more` because this run was not steady yet."""

    floor: frozenset[int]
    more: frozenset[int] = frozenset()

    @property
    def steps(self) -> frozenset[int]:
        """All of them."""
        return self.floor | self.more


def floor_steps(run: Evidence, warmup: int) -> frozenset[int]:
    """The first max(warmup, 10 %) steps of each segment of a run."""
    return frozenset(
        step
        for segment in _segments(run)
        for step in segment[: max(warmup, math.floor(FLOOR_SHARE * len(segment)))]
    )


def warmup_of(run: Evidence, warmup: int) -> Warmup:
    """What of a run is warm-up, by its step times; the floor alone where it has none.

    warmup: the least number of steps of each segment. Raises NotSteady.
    """
    floor = floor_steps(run, warmup)
    series = run.metrics.get(STEP_TIME) or run.metrics.get(TOTAL_STEP_TIME)
    if series is None or not all(math.isfinite(value) and value > 0 for value in series.values):
        # What is not a time has no logarithm, and the ratio that reads it says so.
        return Warmup(floor)
    timed = zip(series.steps, series.values, strict=True)
    logs = {step: math.log(value) for step, value in timed if step not in floor}
    return Warmup(floor, unsettled_steps(run, logs))


def unsettled_steps(run: Evidence, logs: Mapping[int, float], *, either_way: bool = False) -> frozenset[int]:
    """First steps of each segment of a run at which logarithms are above those that follow, by rule 2.

    logs: by step, without the floor. either_way: as well those that are below. Raises NotSteady.
    """
    unsettled: set[int] = set()
    for segment in _segments(run):
        steps = [step for step in segment if step in logs]
        cut = settled_after([logs[step] for step in steps], either_way=either_way)
        if cut and steps[cut] - segment.start > CAP_SHARE * len(segment):
            before, after = (_median([logs[step] for step in part]) for part in (steps[:cut], steps[cut:]))
            raise NotSteady(steps[0], steps[cut - 1], segment[-1], math.expm1(before - after))
        unsettled.update(steps[:cut])
    return frozenset(unsettled)


def settled_after(logs: Sequence[float], *, either_way: bool = False) -> int:
    """How many first values are above what follows, by rule 2; with `either_way` also below it."""
    cut = 0
    while (further := _unlike_start(logs[cut:], either_way)) is not None:
        cut += further
    return cut


def _unlike_start(logs: Sequence[float], either_way: bool) -> int | None:
    """Length of the part before the change point, None where that is like the rest."""
    longest = len(logs) - _FEWEST_AFTER
    if longest < 1:
        return None
    before = list(_deviations(logs))
    after = list(_deviations(logs[::-1]))[::-1]
    cut = min(range(1, longest + 1), key=lambda place: before[place - 1] + after[place])
    explained = before[-1] - before[cut - 1] - after[cut]
    above = _median(logs[:cut]) - _median(logs[cut:])
    unlike = abs(above) if either_way else above
    return cut if unlike > math.log1p(SLOWER) and explained > EXPLAINED * before[-1] else None


def _deviations(values: Sequence[float]) -> Iterator[float]:
    """Sum of absolute deviations from the median, of each prefix of the values (1, 2, …, all of them)."""
    # Two heaps, the lower half negated: each new value moves the median by one place at most.
    lower: list[float] = []
    upper: list[float] = []
    sum_lower = sum_upper = 0.0
    for value in values:
        if len(lower) == len(upper):
            smallest = heappushpop(upper, value)
            sum_upper += value - smallest
            heappush(lower, -smallest)
            sum_lower += smallest
        else:
            largest = -heappushpop(lower, -value)
            sum_lower += value - largest
            heappush(upper, largest)
            sum_upper += largest
        middle = -lower[0]
        yield (middle * len(lower) - sum_lower) + (sum_upper - middle * len(upper))


def _segments(run: Evidence) -> list[range]:
    """Steps of each segment: from its first step to the one before the next segment's."""
    starts = sorted({*run.record.segments})
    ends = [*starts[1:], run.last_step + 1]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
