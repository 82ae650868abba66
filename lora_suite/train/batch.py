# SPDX-License-Identifier: Apache-2.0
"""The unit of work that the data side hands to a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

IGNORED = -100
"""Label of a position that carries no loss: prompt, padding, the last position of a row."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on `device`, copied when the device comes to it: from pageable memory the host would wait."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Extent:
    """How many segments a packed micro batch has, and the length of the longest."""

    segments: int
    longest: int

    @classmethod
    def over(cls, packs: Iterable[Sequence[int]]) -> Extent:
        """The most of either among packs of segments of these lengths."""
        packs = list(packs)
        return cls(max(map(len, packs)), max(max(lengths) for lengths in packs))


@dataclass(frozen=True)
class Segments:
    """Where rows begin and end in a packed micro batch, whose slots are one sequence.

    lengths: of each row in turn, then of the padding, in segments like any other; they sum to the slots.
    boundaries: int32 [segments + 1] on the device, 0 and then the sums of `lengths` (what variable length
    attention calls cu_seqlens). Attention goes from a position to itself and the earlier ones of its own
    segment, nowhere else. of_ranks: the most that any data parallel rank's pack has in this micro batch of a
    step, the same on all of them.
    """

    lengths: tuple[int, ...]
    boundaries: torch.Tensor
    of_ranks: Extent

    @classmethod
    def of(cls, lengths: tuple[int, ...], of_ranks: Extent | None = None) -> Segments:
        """Segments of these lengths, on the CPU; of_ranks: None where there is one rank."""
        boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, boundaries, of_ranks or Extent.over([lengths]))

    @property
    def longest(self) -> int:
        """Length of the longest segment."""
        return max(self.lengths)

    def filled(self, count: int) -> Segments:
        """The same with segments of no length behind, `count` in all; without a wait for the device."""
        more = count - len(self.lengths)
        ends = self.boundaries[-1:].expand(more)
        boundaries = torch.cat([self.boundaries, ends])
        return replace(self, lengths=self.lengths + (0,) * more, boundaries=boundaries)

    def to(self, device: torch.device) -> Segments:
        """The same segments on `device`."""
        return replace(self, boundaries=to_device(self.boundaries, device))


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
            to_device(self.input_ids, device),
            to_device(self.labels, device),
            None if self.positions is None else to_device(self.positions, device),
            None if self.segments is None else self.segments.to(device),
        )
