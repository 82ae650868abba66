# SPDX-License-Identifier: Apache-2.0
"""Examples become global batches, in an order that no parallel layout and no backend changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch

from lora_suite.config.schema import Recipe
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.data.examples import Example, ExamplePool
from lora_suite.train.topology import Axis


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one step over all data parallel ranks, in order."""

    examples: tuple[Example, ...]

    @cached_property
    def tokens(self) -> int:
        """Tokens, padding not counted."""
        return sum(example.length for example in self.examples)

    @cached_property
    def supervised(self) -> int:
        """Tokens that carry loss."""
        return sum(example.supervised for example in self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over token ids and labels of all rows in order, padding not counted.

        Equal fingerprints mean the same work, whatever the micro batch or the layout.
        """
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(example.length.to_bytes(8, "little"))
            digest.update(example.tokens.astype("<i8").tobytes())
            digest.update(example.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Slicing:
    """How a global batch is cut: each data parallel rank takes its rows in order, in micro batches.

    micro_batch_size: rows of a micro batch. multiple: lengths are rounded up to it. fixed_length: every
    micro batch gets this length (None: that of its longest row).
    """

    micro_batch_size: int
    multiple: int
    fixed_length: int | None
    pad_id: int

    def chunks(self, batch: GlobalBatch, dp: Axis) -> list[tuple[Example, ...]]:
        """Rows of each micro batch of one data parallel rank."""
        share = len(batch.examples) // dp.size
        mine = batch.examples[dp.index * share : (dp.index + 1) * share]
        size = self.micro_batch_size
        return [mine[start : start + size] for start in range(0, share, size)]

    def length(self, examples: Sequence[Example]) -> int:
        """Padded length of a micro batch."""
        longest = self.fixed_length or max(example.length for example in examples)
        return -(-longest // self.multiple) * self.multiple

    def micro_batches(self, batch: GlobalBatch, dp: Axis) -> list[MicroBatch]:
        """This data parallel rank's micro batches, on the CPU."""
        return [self._collate(examples) for examples in self.chunks(batch, dp)]

    def slots(self, batch: GlobalBatch, dp_size: int) -> int:
        """Padded token slots of the whole global batch."""
        return sum(
            len(examples) * self.length(examples)
            for index in range(dp_size)
            for examples in self.chunks(batch, Axis(index, dp_size))
        )

    def _collate(self, examples: Sequence[Example]) -> MicroBatch:
        shape = (len(examples), self.length(examples))
        tokens = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        for row, example in enumerate(examples):
            tokens[row, : example.length] = example.tokens
            labels[row, : example.length] = example.labels
        return MicroBatch(torch.from_numpy(tokens), torch.from_numpy(labels))


def plan_steps(
    pool: ExamplePool, rows: Sequence[int], batch_size: int, steps: int, epochs: int, seed: int | None
) -> list[GlobalBatch]:
    """Global batches of the training: at most `steps` of them, and at most `epochs` passes over the rows.

    rows: indices of the rows to train on. seed: of the permutations, one for each epoch (None: the order of
    the data set). Rows that do not fill a batch at the end of an epoch are left out of it.
    """
    batches: list[GlobalBatch] = []
    for epoch in range(epochs):
        if len(batches) == steps or (epoch and not batches):
            break
        examples = pool.usable(_order(rows, seed, epoch))
        while len(batches) < steps:
            batch = tuple(islice(examples, batch_size))
            if len(batch) < batch_size:
                break
            batches.append(GlobalBatch(batch))
    return batches


def _order(rows: Sequence[int], seed: int | None, epoch: int) -> Sequence[int]:
    if seed is None:
        return rows
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    order: list[int] = generator.permutation(np.asarray(rows)).tolist()
    return order


def plan_validation(
    pool: ExamplePool, rows: Sequence[int], batch_size: int, limit: int, pad_id: int
) -> list[GlobalBatch]:
    """All rows (or the first `limit` batches, where it is not 0) in the order of the data set.

    The last batch is filled with rows without labels: every rank must make the same number of forward passes,
    and such rows change neither the summed loss nor the count of tokens.
    """
    empty = Example(np.array([pad_id], dtype=np.int32), first_target=1)
    batches: list[GlobalBatch] = []
    examples = pool.usable(rows)
    while not limit or len(batches) < limit:
        batch = tuple(islice(examples, batch_size))
        if not batch:
            break
        batches.append(GlobalBatch(batch + (empty,) * (batch_size - len(batch))))
    return batches


def slicing_of(recipe: Recipe, micro_batch_size: int, pad_id: int) -> Slicing:
    """The recipe's way of cutting and padding."""
    policy = recipe.policy
    return Slicing(
        micro_batch_size=micro_batch_size,
        multiple=policy.make_sequence_length_divisible_by,
        fixed_length=policy.max_total_sequence_length if recipe.data.pad_to_max_length else None,
        pad_id=pad_id,
    )
