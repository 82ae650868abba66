# SPDX-License-Identifier: Apache-2.0
"""Where this process stands: its rank, device, and place in the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One parallel axis seen from this rank: its index on it, the axis' size, the group of its ranks."""

    index: int
    size: int
    group: dist.ProcessGroup | None = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over the axis and return it; free where the axis has one rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True)
class Topology:
    """Rank, device and axes. Ranks of equal `dp.index` see the same rows and hold one copy of the model.

    dp: data parallel; tp: tensor parallel; pp: pipeline stages. ep: the part of dp over which routed experts
    are split; edp: the part of dp whose ranks hold the same experts (None: all of it). dp_replicas: how often
    weights are held over dp where they are sharded in groups of ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    dp: Axis
    tp: Axis
    pp: Axis
    ep: Axis = Axis(0, 1)
    edp: Axis | None = None
    dp_replicas: int = 1

    @property
    def same_experts(self) -> Axis:
        """The data parallel ranks that hold the same experts as this one."""
        return self.dp if self.edp is None else self.edp
