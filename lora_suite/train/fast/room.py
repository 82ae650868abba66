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
from lora_suite.train.data.slicing import round_up

_SPARE = 1.25
"""How many times the rows of the fullest pack of the first step there is room for."""
_ROWS = 8
"""Room is for a multiple of so many."""


class Room:
    """What packs were seen to need, and a little more: segments, and slots of the longest.

    The kernel starts a block for every 128 slots of every row that there is room for, of each head, whether
    it has anything to do or not. On one H200, 524,000 blocks (256 rows of 8192 slots, 32 heads) cost 3.4 ms
    of a layer's forward and backward, so room is for little more than is needed.
    """

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
            self.rows = round_up(int(rows * _SPARE), _ROWS)
        if longest > self.longest:
            self.longest = 1 << (longest - 1).bit_length()
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
