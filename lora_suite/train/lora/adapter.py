# SPDX-License-Identifier: Apache-2.0
"""One adapter: the pair of factors beside one linear, in its tensor-parallel placement."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from lora_suite.train.lora.operation import Part, adapted_linears
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
    multiplies = False
    """Whether `forward` also makes the product that the adapter is beside."""

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

    def switch(self, on: bool) -> None:
        """Whether the linear adds what the adapter gives."""
        self.enabled = on

    def full_shape(self, factor: str) -> tuple[int, ...]:
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

    @property
    def shard_axis(self) -> Axis:
        """The axis over which factors are split, where they are."""
        return self.tp

    def local_shape(self, factor: str) -> tuple[int, ...]:
        """Shape of this rank's part of the factor."""
        shape = list(self.full_shape(factor))
        dim = self.sharded_dim(factor)
        if dim is not None:
            shape[dim] //= self.shard_axis.size
        return tuple(shape)

    def local_part(self, factor: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole factor."""
        dim = self.sharded_dim(factor)
        return whole if dim is None else whole.chunk(self.shard_axis.size, dim)[self.shard_axis.index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """scale · dropout(x·Aᵀ)·Bᵀ for x [..., in (this rank's part)]; [..., out (this rank's part)].

        For linears whose own product is not ours to make; `beside` makes both.
        """
        spec = self.spec
        if spec.dropout_position == "pre":
            x = self._dropped(x, self._keep(x, x.shape[-1], shard=self.placement == "row"))
        update = functional.linear(functional.linear(x, self.a), self.b) * spec.scale
        if spec.dropout_position == "post":
            keep = self._keep(update, update.shape[-1], shard=self.placement == "column")
            update = self._dropped(update, keep)
        return update

    def beside(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x·Wᵀ + bias + this adapter's part, as one operation (this rank's part of it all).

        weight [out, in] and bias [out] are frozen. Gradients of A and B go straight into the bank's buffer.
        An adapter that multiplies in another dtype than the linear does so beside it.
        """
        if self.a.dtype != weight.dtype:
            update: torch.Tensor = self(x.to(self.a.dtype))
            return functional.linear(x, weight, bias) + update.to(x.dtype)
        spec, column = self.spec, self.placement == "column"
        keep_input = keep_output = None
        if spec.dropout_position == "pre":
            keep_input = self._keep(x, x.shape[-1], shard=self.placement == "row")
        else:
            keep_output = self._keep(x, weight.shape[0], shard=column)
        dropping = keep_input is not None or keep_output is not None
        part = Part(weight, bias, self.b, keep_input, keep_output)
        scale = spec.scale / (1.0 - spec.dropout) if dropping else spec.scale
        (y,) = adapted_linears(x, self.a, [part], scale, accumulate=self.a.grad is not None)
        return y

    def _keep(self, x: torch.Tensor, channels: int, shard: bool) -> torch.Tensor | None:
        """Which of [..., channels] elements dropout leaves, for rows like x's; None where it drops nothing.

        Tensor-parallel ranks must draw equal masks where values are replicated and different ones where they
        are shards. The generator is equally seeded on all of them, so a shard takes its slice of the whole
        mask. For `post` in a row-parallel linear equal masks on all partial sums drop the sum's elements.
        """
        spec = self.spec
        if not self.training or spec.dropout == 0.0:
            return None
        whole = (*x.shape[:-1], channels * (self.tp.size if shard else 1))
        keep = torch.rand(whole, device=x.device, generator=self.generator) >= spec.dropout
        return keep.chunk(self.tp.size, -1)[self.tp.index] if shard else keep

    def _dropped(self, x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """Inverted dropout: what is left is scaled up, so that the mean stays."""
        return x if keep is None else x * keep / (1.0 - self.spec.dropout)
