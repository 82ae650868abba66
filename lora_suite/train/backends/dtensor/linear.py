# SPDX-License-Identifier: Apache-2.0
"""A linear with an adapter beside it, whole or split over tensor-parallel ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from lora_suite.train.lora.adapter import Adapter

OUTPUT: dict[str, Placement] = {"column": Shard(-1), "row": Partial()}
"""What this rank's output of an adapter is: a shard, or a part of a sum."""


class LoraLinear(nn.Linear):
    """y = x·Wᵀ + bias + adapter(x), with `weight` and `bias` named as in the plain linear.

    Under tensor parallelism x and y are DTensors and the adapter computes on this rank's shards. A
    column-parallel linear sees a replicated x and gives a shard of y; the gradient that its adapter gives
    back for x is partial like the linear's own, and joins it before the reduction that is there anyway. A
    row-parallel linear sees a shard of x; its adapter's output is partial and joins the linear's own before
    its reduction. So adapters add no collective.
    """

    adapter: Adapter

    @classmethod
    def adapt(cls, linear: nn.Linear, adapter: Adapter) -> LoraLinear:
        """Put `adapter` beside a linear, in place: parameters and hooks stay the linear's own."""
        linear.__class__ = cls
        adapted = cast(LoraLinear, linear)
        adapted.adapter = adapter
        return adapted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] to y [..., out]; as the plain linear where the adapter is not enabled."""
        y = super().forward(x)
        return y + self._update(x) if self.adapter.enabled else y

    def _update(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds; for a DTensor, computed on this rank's shards."""
        if not isinstance(x, DTensor):
            return self._local_update(x)
        placement = self.adapter.placement
        # A shard's gradient is a shard; that of a replicated input is this rank's part of a sum.
        gradient = [Partial()] if placement == "column" else None
        update = self._local_update(x.to_local(grad_placements=gradient))
        return DTensor.from_local(update, x.device_mesh, [OUTPUT[placement]], run_check=False)

    def _local_update(self, x: torch.Tensor) -> torch.Tensor:
        """The adapter's output in x's dtype, whatever dtype the adapter multiplies in."""
        update: torch.Tensor = self.adapter(x.to(self.adapter.a.dtype))
        return update.to(x.dtype)
