# SPDX-License-Identifier: Apache-2.0
"""A global batch is cut into micro batches: rows padded to one length, or packed one behind the other.

Either way the same rows are in the same step, and the loss is divided by the same number of supervised
tokens, so loss and gradients are equal; what differs is how many slots they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lora_suite.config.schema import Recipe
from lora_suite.train.batch import IGNORED, Extent, MicroBatch, Segments
from lora_suite.train.data.batches import GlobalBatch
from lora_suite.train.data.examples import Example
from lora_suite.train.topology import Axis


class Slicing(Protocol):
    """How a global batch is cut. Every data parallel rank gets equally many micro batches."""

    def micro_batches(self, batch: GlobalBatch, dp: Axis) -> list[MicroBatch]:
        """This data parallel rank's micro batches, on the CPU."""
        ...

    def slots(self, batch: GlobalBatch, dp_size: int) -> int:
        """Token slots of the whole global batch over all data parallel ranks, padded ones too."""
        ...


@dataclass(frozen=True)
class PaddedRows:
    """Each data parallel rank takes its rows in order, `micro_batch_size` at a time, padded on the right.

    multiple: lengths are rounded up to it. fixed_length: every micro batch gets this length (None: that of
    its longest row).
    """

    micro_batch_size: int
    multiple: int
    fixed_length: int | None
    pad_id: int

    def micro_batches(self, batch: GlobalBatch, dp: Axis) -> list[MicroBatch]:
        """This data parallel rank's micro batches, on the CPU."""
        return [self._collate(examples) for examples in self._chunks(batch, dp)]

    def slots(self, batch: GlobalBatch, dp_size: int) -> int:
        """Token slots of the whole global batch over all data parallel ranks, padded ones too."""
        return sum(
            len(examples) * self._length(examples)
            for index in range(dp_size)
            for examples in self._chunks(batch, Axis(index, dp_size))
        )

    def _chunks(self, batch: GlobalBatch, dp: Axis) -> list[tuple[Example, ...]]:
        """Rows of each micro batch of one data parallel rank."""
        share = len(batch.examples) // dp.size
        mine = batch.examples[dp.index * share : (dp.index + 1) * share]
        size = self.micro_batch_size
        return [mine[start : start + size] for start in range(0, share, size)]

    def _length(self, examples: Sequence[Example]) -> int:
        longest = self.fixed_length or max(example.length for example in examples)
        return round_up(longest, self.multiple)

    def _collate(self, examples: Sequence[Example]) -> MicroBatch:
        shape = (len(examples), self._length(examples))
        tokens = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        for row, example in enumerate(examples):
            tokens[row, : example.length] = example.tokens
            labels[row, : example.length] = example.labels
        return MicroBatch(torch.from_numpy(tokens), torch.from_numpy(labels))


PADDING = 512
"""Slots of the longest segment of padding: attention to it costs little, and it is not a pack's longest."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of the whole global batch are packed into sequences of `capacity` slots, one a micro batch.

    Which rows share a sequence does not depend on the layout. Rank d of D takes the sequences d, d + D, …;
    where they do not come out even, sequences of padding alone fill up, which count nothing in the loss.
    longest: no segment of padding has more slots; a row's length, so that no position is above a row's.
    """

    capacity: int
    pad_id: int
    longest: int

    def micro_batches(self, batch: GlobalBatch, dp: Axis) -> list[MicroBatch]:
        """This data parallel rank's micro batches, on the CPU."""
        packs = self._packs(batch)
        packs += [[]] * (-len(packs) % dp.size)
        made = []
        for start in range(0, len(packs), dp.size):
            beside = packs[start : start + dp.size]
            of_ranks = Extent.over(map(self._segments, beside))
            made.append(self._collate(beside[dp.index], of_ranks))
        return made

    def slots(self, batch: GlobalBatch, dp_size: int) -> int:
        """Token slots of the whole global batch over all data parallel ranks, padded ones too."""
        return round_up(len(self._packs(batch)), dp_size) * self.capacity

    def _packs(self, batch: GlobalBatch) -> list[list[Example]]:
        lengths = [example.length for example in batch.examples]
        return [
            [batch.examples[index] for index in pack] for pack in first_fit_decreasing(lengths, self.capacity)
        ]

    def _segments(self, pack: Sequence[Example]) -> list[int]:
        """Lengths of a pack's rows, and of the segments of its padding."""
        lengths = [example.length for example in pack]
        piece = min(self.longest, PADDING)
        return lengths + [min(piece, self.capacity - at) for at in range(sum(lengths), self.capacity, piece)]

    def _collate(self, pack: Sequence[Example], of_ranks: Extent) -> MicroBatch:
        tokens = np.full(self.capacity, self.pad_id, dtype=np.int64)
        labels = np.full(self.capacity, IGNORED, dtype=np.int64)
        start = 0
        for example in pack:
            here = slice(start, start + example.length)
            tokens[here], labels[here] = example.tokens, example.labels
            start = here.stop
        lengths = self._segments(pack)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return MicroBatch(
            torch.from_numpy(tokens[None]),
            torch.from_numpy(labels[None]),
            torch.from_numpy(positions[None]),
            Segments.of(tuple(lengths), of_ranks),
        )


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of what goes together into each bin: the longest first, each into the first bin that has room.

    Needs at most 11/9 of the best possible number of bins, and one more (D. S. Johnson, Near-optimal bin
    packing algorithms, 1973). Of equal lengths the earlier index comes first. Raises ValueError for a length
    above the capacity.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a row of {length} tokens does not fit into {capacity} slots")
        place = next((number for number, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
    return bins


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def slicing_of(recipe: Recipe, micro_batch_size: int, pad_id: int) -> Slicing:
    """The recipe's way of cutting a global batch.

    A packed sequence has room for as many of the longest rows as a micro batch has rows.
    """
    policy = recipe.policy
    longest, multiple = policy.max_total_sequence_length, policy.make_sequence_length_divisible_by
    if policy.sequence_packing.enabled:
        return PackedRows(round_up(longest * micro_batch_size, multiple), pad_id, longest)
    return PaddedRows(
        micro_batch_size=micro_batch_size,
        multiple=multiple,
        fixed_length=longest if recipe.data.pad_to_max_length else None,
        pad_id=pad_id,
    )
