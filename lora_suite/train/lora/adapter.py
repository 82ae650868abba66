# SPDX-License-Identifier: Apache-2.0
"""One adapter: the pair of factors beside one linear, in its tensor-parallel placement."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.topology import Axis

Placement = Literal["none", "column", "row"]


class Adapter(nn.Module):
    """Factors A [rank, in] and B [out, rank] beside a linear [out, in], this rank's part of them.

    Placement over the tensor-parallel axis follows the linear's. Column-parallel: A is replicated and B is
    sharded like the output. Row-parallel: A is sharded like the input and B is replicated, and `forward`
    gives this rank's part of a sum: it is added *before* the linear's own reduction. No extra activation
    collective either way, and no relation between rank and tp size. The replicated factor's gradient is
    partial on each tp rank; the bank sums it once a step.

    The factors are registered by the `AdapterBank` that owns the adapter. `enabled` is read by the module
    that calls the adapter.
    """

    a: nn.Parameter
    b: nn.Parameter

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        spec: LoraSpec,
        placement: Placement = "none",
        tp: Axis | None = None,
    ) -> None:
        super().__init__()
        if placement != "none" and tp is None:
            raise ValueError(f"adapter {name}: placement {placement} needs the tensor-parallel axis")
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.spec = spec
        self.placement = placement
        self.tp = tp if tp is not None else Axis(0, 1)
        self.enabled = True
        self.generator: torch.Generator | None = None

    def full_shape(self, factor: str) -> tuple[int, int]:
        """Shape of the whole factor `a` or `b`, over all tp ranks."""
        rank = self.spec.rank
        return (rank, self.in_features) if factor == "a" else (self.out_features, rank)

    def sharded_dim(self, factor: str) -> int | None:
        """The dim over which tp ranks split the factor; None where they hold replicas of it."""
        if self.placement == "column" and factor == "b":
            return 0
        if self.placement == "row" and factor == "a":
            return 1
        return None

    def local_part(self, factor: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole factor."""
        dim = self.sharded_dim(factor)
        return whole if dim is None else whole.chunk(self.tp.size, dim)[self.tp.index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """scale · dropout(x·Aᵀ)·Bᵀ for x [..., in (this rank's part)]; [..., out (this rank's part)]."""
        spec = self.spec
        if spec.dropout_position == "pre":
            x = self._dropout(x, shard=self.placement == "row")
        update = functional.linear(functional.linear(x, self.a), self.b) * spec.scale
        if spec.dropout_position == "post":
            update = self._dropout(update, shard=self.placement == "column")
        return update

    def _dropout(self, x: torch.Tensor, shard: bool) -> torch.Tensor:
        """Inverted dropout with the adapter's own generator.

        Tensor-parallel ranks must draw equal masks where x is replicated and different ones where it is a
        shard. The generator is equally seeded on all of them, so a shard takes its slice of the whole mask.
        For `post` in a row-parallel linear the equal mask on every partial sum drops the sum's elements.
        """
        spec = self.spec
        if not self.training or spec.dropout == 0.0:
            return x
        whole = (*x.shape[:-1], x.shape[-1] * (self.tp.size if shard else 1))
        keep = torch.rand(whole, device=x.device, generator=self.generator) >= spec.dropout
        if shard:
            keep = keep.chunk(self.tp.size, -1)[self.tp.index]
        return x * keep / (1.0 - spec.dropout)
