# SPDX-License-Identifier: Apache-2.0
"""The order in which a pair's arms run, so that a drifting machine does not favour one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lora_suite.plan.model import Pair, PlannedRun

LOOKS = (2, 4, 6, 8)
"""Repeats after which a pair with a time budget is judged; even, so that a linear drift has cancelled."""


def interleave(arms: Sequence[str], repeats: int, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield ``(repeat, arm)`` in ABBA BAAB order: repeats `first` to ``first + repeats - 1``, all arms in
    each.

    A repeat runs the arms forwards or backwards; which of the two follows the Thue-Morse sequence. Over every
    4 repeats of two arms both arms then have the same mean position and the same mean squared position, so
    that a linear drift of the machine cancels after 2 repeats, a quadratic one after 4 (E. F. Thue; see
    https://oeis.org/A010060). With `first` a caller continues a sequence that it began.
    """
    for repeat in range(first, first + repeats):
        backwards = (repeat - 1).bit_count() % 2 == 1
        for arm in reversed(arms) if backwards else arms:
            yield repeat, arm


def looks_up_to(repeats: int | None) -> tuple[int, ...]:
    """The looks at a pair that may have this many repeats (None: as many as the last look has)."""
    last = min(repeats or LOOKS[-1], LOOKS[-1])
    return (*(look for look in LOOKS if look < last), last)


def ordered_runs(pairs: Sequence[Pair], alone: Sequence[str], repeats: int) -> Iterator[PlannedRun]:
    """Yield all runs, one after another: no two of them ever at once.

    First every pair up to its first look (to its end, where it has no looks), each interleaved and after its
    warm-up; then the cases outside pairs, repeat by repeat; then, round by round, each pair from one look to
    the next. So everything has a verdict before anything is repeated for the sake of precision. Repeats count
    from 1 for each case: a case that several pairs run counts on from one to the next.
    """
    done: Counter[str] = Counter()
    makers = [pair for pair in pairs if not pair.reuse]
    warmed: set[str] = set()
    for pair in makers:
        yield from _warmup(pair, warmed)
        yield from _stage(pair, 0, _stages(pair)[0], done)
    for repeat in range(1, repeats + 1):
        for stem in alone:
            yield PlannedRun(case=stem, repeat=repeat, pair=None, arm=None)
    for number in range(1, max((len(_stages(pair)) for pair in makers), default=0)):
        for pair in makers:
            stages = _stages(pair)
            if number < len(stages):
                yield from _stage(pair, stages[number - 1], stages[number], done)


def _stages(pair: Pair) -> tuple[int, ...]:
    return pair.looks or (pair.repeats,)


def _warmup(pair: Pair, warmed: set[str]) -> Iterator[PlannedRun]:
    """The discarded run of the first arm that no pair before it has warmed; none where all are."""
    cold = [(arm, stem) for arm, stem in pair.arms.items() if stem not in warmed]
    if pair.warmup_runs and cold:
        arm, stem = cold[0]
        warmed.add(stem)
        yield PlannedRun(case=stem, repeat=0, pair=pair.name, arm=arm)


def _stage(pair: Pair, made: int, until: int, done: Counter[str]) -> Iterator[PlannedRun]:
    """The pair's repeats after the first `made` of them; done: runs of each case so far."""
    for _, arm in interleave(list(pair.arms), until - made, first=made + 1):
        stem = pair.arms[arm]
        done[stem] += 1
        yield PlannedRun(case=stem, repeat=done[stem], pair=pair.name, arm=arm)
