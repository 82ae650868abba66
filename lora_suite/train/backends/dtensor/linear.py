# SPDX-License-Identifier: Apache-2.0
"""A linear with an adapter beside it, whole or split over tensor-parallel ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from lora_suite.train.lora.adapter import Adapter

OUTPUT: dict[str, Placement] = {"column": Shard(-1), "row": Partial()}
"""What this rank's output is: a shard, or a part of a sum."""


class LoraLinear(nn.Linear):
    """y = x·Wᵀ + bias + adapter(x), with `weight` and `bias` named as in the plain linear.

    Linear and adapter are one operation (`lora_suite.train.lora.operation`). Under tensor parallelism x and y
    are DTensors, and the operation works on this rank's shards. A column-parallel linear sees a replicated x
    and gives a shard of y; the gradient that it gives back for x is partial, the adapter's part in it, and is
    reduced where a plain linear's would be. A row-parallel linear sees a shard of x; its output is partial,
    the adapter's part in it, and is reduced once. So adapters add no collective.
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
        adapter = self.adapter
        if not adapter.enabled:
            return super().forward(x)
        if not isinstance(x, DTensor):
            return adapter.beside(x, self.weight, self.bias)
        column = adapter.placement == "column"
        # A shard's gradient is a shard; that of a replicated input is this rank's part of a sum.
        part = x.to_local(grad_placements=[Partial()] if column else None)
        # The bias of a row-parallel linear is whole on every rank, so it joins the whole sum.
        bias = _local(self.bias) if column and self.bias is not None else None
        local = adapter.beside(part, _local(self.weight), bias)
        y = DTensor.from_local(local, x.device_mesh, [OUTPUT[adapter.placement]], run_check=False)
        return y if column or self.bias is None else y + self.bias


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that tensor parallelism has split."""
    return cast(DTensor, parameter).to_local()
