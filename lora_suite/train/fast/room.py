# SPDX-License-Identifier: Apache-2.0
"""How many packed rows, and how long ones, a captured pass has room for.

A graph's tensors have one size. So there is room for a fixed number of rows in a pack, where rows of no
length stand for those that it does not have, and the attention kernel is launched for rows of a fixed length.
It starts a block for every 128 slots of every row that there is room for, of each head, whether there is
anything to do or not: on one H200, 524,000 blocks (256 rows of 8192 slots, 32 heads) cost 3.4 ms of a
layer's forward and backward. Packs of long rows have few of them, packs of short ones many. So packs are told
apart by the power of two that their longest row fits into, and each kind has a graph and a room of its own.

What counts is the most that any data parallel rank has at once, so that all ranks capture the same kinds in
the same order: a pass may hold sums over ranks, which a rank that captures would otherwise wait for alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_suite.train.batch import MicroBatch, Segments
from lora_suite.train.data.slicing import round_up

_SHORTEST = 512
"""Packs whose rows are all shorter are of one kind."""
_SPARE = 1.25
"""For how many times the rows of the fullest pack there is room."""
_ROWS = 8
"""Room is for a multiple of so many rows."""


class Room:
    """Rows in a pack that there is room for, by the length that they fit into; as large as was needed yet."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    @staticmethod
    def length(pack: Segments) -> int:
        """The length that each row of a pack, and of what other ranks have beside it, fits into."""
        return max(_SHORTEST, 1 << (pack.of_ranks.longest - 1).bit_length())

    def grow(self, batches: Sequence[MicroBatch]) -> dict[int, str]:
        """Have room for the packs among the micro batches.

        Returns the kinds for which there was room, but too little, by length, and what to say of each.
        """
        packs = [batch.segments for batch in batches if batch.segments is not None]
        fullest: dict[int, int] = {}
        for pack in packs:
            fullest[self.length(pack)] = max(fullest.get(self.length(pack), 0), pack.of_ranks.segments)
        outgrown = {}
        for length, rows in fullest.items():
            had = self.rows.get(length, 0)
            if rows > had:
                self.rows[length] = round_up(int(rows * _SPARE), _ROWS)
                if had:
                    outgrown[length] = (
                        f"a pack has {rows} rows of up to {length} tokens, there was room for {had}, "
                        f"there is for {self.rows[length]} from here on"
                    )
        return outgrown

    def fit(self, batch: MicroBatch) -> MicroBatch:
        """The same micro batch with as many segments as there is room for."""
        if batch.segments is None:
            return batch
        return replace(batch, segments=batch.segments.filled(self.rows[self.length(batch.segments)]))
