# SPDX-License-Identifier: Apache-2.0
"""Peak memory against a reference: one run each is enough.

What an allocator handed out at most is the same in every run of a program on one machine, so it needs no
repeats and no interval: two peaks are equal where they are the same number of 2 MiB blocks, the smallest
piece in which PyTorch's CUDA allocator asks for memory. A change of half a percent at most is told, a larger
growth fails. This holds for allocated memory on a GPU; what a process or a driver reports moves by itself,
and belongs behind a limit of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from check_metrics.functions import BLOCKS_PER_GIB
from lora_suite.judge.verdict import State

LARGEST_GROWTH = 0.005


@dataclass(frozen=True)
class MemoryChange:
    """A peak against its reference, both in blocks of 2 MiB.

    kind: `equal`, `slight` (half a percent at most, either way), `less` or `more`.
    """

    kind: Literal["equal", "slight", "less", "more"]
    blocks: int
    reference: int

    @property
    def share(self) -> float:
        """Growth as a share of the reference: 0.01 is 1 %."""
        return self.blocks / self.reference - 1.0

    @property
    def state(self) -> State:
        """FAIL where it grew by more than is told."""
        return "FAIL" if self.kind == "more" else "PASS"

    def __str__(self) -> str:
        """`12.50 GiB, 4.17 % more than 12.00 GiB (+256 blocks of 2 MiB)`."""
        now, before = (blocks / BLOCKS_PER_GIB for blocks in (self.blocks, self.reference))
        if self.kind == "equal":
            return f"{now:.2f} GiB, equal to the block of 2 MiB"
        word = "more" if self.blocks > self.reference else "less"
        return (
            f"{now:.2f} GiB, {100 * abs(self.share):.2f} % {word} than {before:.2f} GiB "
            f"({self.blocks - self.reference:+d} blocks of 2 MiB)"
        )


def compare_peaks(peak: float, reference: float, growth: float = LARGEST_GROWTH) -> MemoryChange:
    """Hold a peak (GiB) against its reference (GiB).

    growth: the largest share that is only told. Raises ValueError where a peak is not finite or less than a
    block.
    """
    for value in (peak, reference):
        if not (math.isfinite(value) and round(value * BLOCKS_PER_GIB) > 0):
            raise ValueError(f"{value:g} GiB is no peak of memory: it is less than a block of 2 MiB")
    blocks, before = (round(value * BLOCKS_PER_GIB) for value in (peak, reference))
    if blocks == before:
        return MemoryChange("equal", blocks, before)
    if abs(blocks - before) <= growth * before:
        return MemoryChange("slight", blocks, before)
    return MemoryChange("more" if blocks > before else "less", blocks, before)
