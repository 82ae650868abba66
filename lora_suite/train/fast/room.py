# SPDX-License-Identifier: Apache-2.0
"""How many packed rows, and how long ones, a captured pass has room for.

A graph's tensors have one size. So there is room for a fixed number of rows in a pack, where rows of no
length stand for those that it does not have, and the attention kernel is launched for rows of a fixed length.
Too much room costs a little time in each step, too little a new capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_suite.train.batch import MicroBatch

_LEAST = 16
_SPARE = 1.25
"""How many rows more than the fullest pack of the first step."""


class Room:
    """What packs were seen to need, rounded up to powers of two: segments, and slots of the longest."""

    def __init__(self) -> None:
        self.rows = 0
        self.longest = 0

    def grow(self, batches: Sequence[MicroBatch]) -> str | None:
        """Have room for the packs among the micro batches; say what was too small where something was."""
        packs = [batch.segments for batch in batches if batch.segments is not None]
        rows = max((len(pack.lengths) for pack in packs), default=0)
        longest = max((pack.longest for pack in packs), default=0)
        if rows <= self.rows and longest <= self.longest:
            return None
        had = (self.rows, self.longest)
        if rows > self.rows:
            self.rows = _power_of_two(max(_LEAST, int(rows * _SPARE)))
        if longest > self.longest:
            self.longest = _power_of_two(longest)
        if not any(had):
            return None
        return (
            f"a pack has {rows} rows of up to {longest} tokens, and there was room for {had[0]} of {had[1]}; "
            f"there is for {self.rows} of {self.longest} from here on"
        )

    def fit(self, batch: MicroBatch) -> MicroBatch:
        """The same micro batch with as many segments as there is room for."""
        if batch.segments is None:
            return batch
        return replace(batch, segments=batch.segments.filled(self.rows))


def _power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << (least - 1).bit_length()
