# SPDX-License-Identifier: Apache-2.0
"""Where warm-up ends: a fixed floor, then a cut that follows the step times, then a cap.

Compilation, caches and allocators make first steps slow, for as many steps as nobody knows beforehand. So of
each segment of a run (its start and each resume), on the logarithm of the step times:

1. the first max(warmup, 10 % of the segment) steps are left out;
2. the single change point that leaves the least absolute deviation from the medians on both sides is sought;
   if the level before it is more than 10 % above the level after it, and the change explains half of the
   deviation, what lies before is left out too, and the search goes on in the rest (compilation, then caches);
3. where more than half of the segment would have to go, the run never became steady, and nothing is said of
   its speed. Some never do: Barrett et al., "Virtual machine warmup blows hot and cold", OOPSLA 2017; Traini
   et al., Empirical Software Engineering 28, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """More than half of a run would be warm-up; the text says which steps are slower than the rest."""


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
    if series is None:
        return Warmup(floor)
    more: set[int] = set()
    for segment in _segments(run):
        timed = [
            (step, value) for step in segment if step not in floor and (value := series.at(step)) is not None
        ]
        # What is not a time has no logarithm, and the ratio that reads it says so.
        if not all(math.isfinite(value) and value > 0 for _, value in timed):
            continue
        slow = settled_after([value for _, value in timed])
        if slow and timed[slow][0] - segment.start > CAP_SHARE * len(segment):
            share = _level(timed[:slow]) / _level(timed[slow:]) - 1
            raise NotSteady(
                f"steps {timed[0][0]}-{timed[slow - 1][0]} of {segment[-1]} take {100 * share:.0f} % longer "
                f"than the rest: more than half of the run would be warm-up"
            )
        more.update(step for step, _ in timed[:slow])
    return Warmup(floor, frozenset(more))


def settled_after(times: Sequence[float]) -> int:
    """How many first values are slower than what follows, by the rule 2 above. Values must be positive."""
    logs = [math.log(value) for value in times]
    cut = 0
    while (further := _slow_start(logs[cut:])) is not None:
        cut += further
    return cut


def _slow_start(logs: Sequence[float]) -> int | None:
    """Length of the part before the change point, None where that is not slower than the rest."""
    longest = len(logs) - _FEWEST_AFTER
    if longest < 1:
        return None
    before = list(_deviations(logs))
    after = list(_deviations(logs[::-1]))[::-1]
    cut = min(range(1, longest + 1), key=lambda place: before[place - 1] + after[place])
    explained = before[-1] - before[cut - 1] - after[cut]
    slower = _median(logs[:cut]) - _median(logs[cut:])
    if slower > math.log1p(SLOWER) and explained > EXPLAINED * before[-1]:
        return cut
    return None


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


def _level(timed: Sequence[tuple[int, float]]) -> float:
    return math.exp(_median([math.log(value) for _, value in timed]))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
