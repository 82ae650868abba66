# SPDX-License-Identifier: Apache-2.0
"""The unit of work that the data side hands to a backend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

IGNORED = -100
"""Label of a position that carries no loss: prompt, padding, the last position of a row."""


@dataclass(frozen=True)
class Segments:
    """Where rows begin and end in a packed micro batch, whose slots are one sequence.

    lengths: of each row in turn, then of the padding, in segments like any other; they sum to the slots.
    boundaries: int32 [segments + 1] on the device, 0 and then the sums of `lengths` (what variable length
    attention calls cu_seqlens). Attention goes from a position to itself and the earlier ones of its own
    segment, nowhere else.
    """

    lengths: tuple[int, ...]
    boundaries: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> Segments:
        """Segments of these lengths, on the CPU."""
        return cls(lengths, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))

    @property
    def longest(self) -> int:
        """Length of the longest segment."""
        return max(self.lengths)

    def filled(self, count: int) -> Segments:
        """The same with segments of no length behind, `count` in all; without a wait for the device."""
        more = count - len(self.lengths)
        ends = self.boundaries[-1:].expand(more)
        return Segments(self.lengths + (0,) * more, torch.cat([self.boundaries, ends]))

    def to(self, device: torch.device) -> Segments:
        """The same segments on `device`."""
        return Segments(self.lengths, self.boundaries.to(device, non_blocking=True))


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    input_ids: int64 [rows, length]. labels: int64 [rows, length], already shifted: labels[i, t] is the token
    that position t must predict, or IGNORED.

    Without `segments` each row of the data stands in a row of its own, padded on the right. Padding carries
    no loss, so causal attention needs no mask: no supervised position can see a padded one. With `segments`
    the rows are packed one behind the other into [1, length], and `positions` (int64 [1, length]) counts from
    0 in each; a model must use both, or rows see each other.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    segments: Segments | None = None

    @property
    def slots(self) -> int:
        """Token slots, padded ones too: rows × length."""
        return self.input_ids.numel()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Input ids and labels; of packed rows also positions and boundaries."""
        if self.positions is None or self.segments is None:
            return self.input_ids, self.labels
        return self.input_ids, self.labels, self.positions, self.segments.boundaries

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`."""
        return MicroBatch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            None if self.positions is None else self.positions.to(device, non_blocking=True),
            None if self.segments is None else self.segments.to(device),
        )
