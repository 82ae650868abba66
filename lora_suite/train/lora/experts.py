# SPDX-License-Identifier: Apache-2.0
"""Adapters of routed experts: one for every expert of a stack, or one that all of them share."""

from __future__ import annotations

import torch

from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.grouped import Form, grouped_linear, grouped_lora
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.topology import Axis


class SharedExpertAdapter(Adapter):
    """Factors A [rank, in] and B [out, rank] that all experts of a stack [experts, out, in] share.

    form: how the experts' own products are computed, see `lora_suite.train.lora.grouped`.
    """

    multiplies = True

    def __init__(self, name: str, in_features: int, out_features: int, spec: LoraSpec, *, form: Form) -> None:
        super().__init__(name, in_features, out_features, spec)
        self.form = form

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """As `ExpertAdapter.forward`; autograd hands the factors their gradients."""
        y = grouped_linear(x, weight, offsets, self.form)
        return y + super().forward(x.to(self.a.dtype)).to(y.dtype) if self.enabled else y


class ExpertAdapter(Adapter):
    """Factors A [experts, rank, in] and B [experts, out, rank] beside a stack of experts [experts, out, in].

    form: how products are computed, see `lora_suite.train.lora.grouped`. ep: the expert parallel axis; each
    of its ranks has the factors of the experts that it has, and of no others. So their gradients are summed
    over ranks that hold the same experts only. Raises ValueError for dropout: what would be dropped of a row
    depends on where it was routed, and PEFT has none there, either.
    """

    multiplies = True

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        spec: LoraSpec,
        experts: int,
        form: Form,
        ep: Axis | None = None,
    ) -> None:
        super().__init__(name, in_features, out_features, spec)
        if spec.dropout:
            raise ValueError(f"adapter {name}: an adapter of every routed expert has no dropout")
        self.experts = experts
        self.form = form
        self.ep = ep if ep is not None else Axis(0, 1)

    def full_shape(self, factor: str) -> tuple[int, ...]:
        """Shape of the whole factor `a` or `b`, of all experts."""
        return (self.experts, *super().full_shape(factor))

    def sharded_dim(self, factor: str) -> int | None:
        """The dim over which expert parallel ranks split both factors; None where there is one."""
        return 0 if self.ep.size > 1 else None

    @property
    def shard_axis(self) -> Axis:
        """The axis over which factors are split."""
        return self.ep

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Each row times its expert's weight, with its expert's adapter: [rows, out].

        x [rows, in], expert after expert; weight [experts (this rank's), out, in]; offsets int32 [experts
        (this rank's)], where each expert's rows end. Gradients of A and B go straight into the bank's buffer.
        """
        if not self.enabled:
            return grouped_linear(x, weight, offsets, self.form)
        accumulate = self.a.grad is not None
        return grouped_lora(
            x, weight, self.a, self.b, offsets, self.spec.scale, self.form, accumulate=accumulate
        )
