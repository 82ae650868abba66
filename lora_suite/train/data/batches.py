# SPDX-License-Identifier: Apache-2.0
"""Examples become global batches, in an order that no parallel layout and no backend changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from lora_suite.train.data.examples import Example, Pool


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

        Equal fingerprints mean that the same is learnt, whatever the micro batch, the packing or the layout.
        """
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(example.length.to_bytes(8, "little"))
            digest.update(example.tokens.astype("<i8").tobytes())
            digest.update(example.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def plan_steps(
    pool: Pool, rows: Sequence[int], batch_size: int, steps: int, epochs: int, seed: int | None
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
    pool: Pool, rows: Sequence[int], batch_size: int, limit: int, pad_id: int
) -> list[GlobalBatch]:
    """All rows (or the first `limit` batches, where it is not 0) in the order of the data set.

    The last batch is filled with rows without labels: every rank must make the same number of forward passes,
    and such rows change neither the summed loss nor the count of tokens.
    """
    empty = Example(np.array([pad_id], dtype=np.int32), np.array([False]))
    batches: list[GlobalBatch] = []
    examples = pool.usable(rows)
    while not limit or len(batches) < limit:
        batch = tuple(islice(examples, batch_size))
        if not batch:
            break
        batches.append(GlobalBatch(batch + (empty,) * (batch_size - len(batch))))
    return batches
