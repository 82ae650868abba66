# SPDX-License-Identifier: Apache-2.0
"""The gated MLP as one operation, so that its wide intermediates are made with room for the adapters' parts.

    forward     gu = [x, t₁]·[W₁, sB₁]ᵀ,   wide = [act, act·A₂ᵀ],   y = wide·[W₂, sB₂]ᵀ
    backward    u₂ = dy·sB₂,   d_act = [dy, u₂]·[W₂; A₂],   wide' = [d, d·sB₁],   dx = wide'·[W₁; A₁]

with act = silu(gate) · up and d its gradient by gate and up. See `linears` for the frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional

from lora_suite.train.fast.linears import (
    FramedLinear,
    Layout,
    StackedLinear,
    Thin,
    factor_gradients,
    from_flat,
    handed,
)


@dataclass(frozen=True)
class GatedOps:
    """The two operations around the gated activation: `kernels.gated` and `kernels.gated_backward`."""

    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated_backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def kernel_ops(dtype: torch.dtype) -> GatedOps | None:
    """The kernels of a GPU; None for float64, since they compute in float32."""
    if dtype == torch.float64:
        return None
    from lora_suite.train.fast import kernels

    return GatedOps(kernels.gated, kernels.gated_backward)


def gated_mlp(
    x: torch.Tensor,
    gate_up: StackedLinear | FramedLinear,
    down: StackedLinear | FramedLinear,
    ops: GatedOps | None,
) -> torch.Tensor:
    """down(silu(gate) · up) of x [tokens, hidden].

    ops: kernels to use where they apply: in training, without bias, and with adapters on both stacks or on
    neither.
    """
    if ops is not None and torch.is_grad_enabled() and gate_up.bias is None and down.bias is None:
        if isinstance(gate_up, StackedLinear) and isinstance(down, StackedLinear):
            return cast(torch.Tensor, down(gated_activation(gate_up(x), ops)))
        if isinstance(gate_up, FramedLinear) and isinstance(down, FramedLinear) and gate_up.enabled:
            factors = (*gate_up.factors, *down.factors)
            layouts = (gate_up.layout, down.layout)
            counts = (len(gate_up.factors), len(down.factors))
            thin = (gate_up.thin, down.thin)
            return _apply(_FramedMlp, x, gate_up.matrix, down.matrix, layouts, counts, thin, ops, *factors)
    return cast(torch.Tensor, down(gated_activation(gate_up(x), None)))


def gated_activation(gate_up: torch.Tensor, ops: GatedOps | None) -> torch.Tensor:
    """silu(gate) · up of [gate, up] [tokens, 2 · width]; ops: kernels to use in training."""
    if ops is not None and torch.is_grad_enabled():
        return _apply(_Gated, gate_up, ops)
    gate, up = gate_up.chunk(2, 1)
    return functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    """silu(gate) · up of [gate, up]."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, ops: GatedOps) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.ops = ops
        return ops.gated(gate_up, gate_up.new_empty(0, gate_up.shape[1] // 2))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        return ctx.ops.gated_backward(gate_up, gradients[0], gate_up.new_empty(gate_up.shape[1], 0)), None


class _FramedMlp(torch.autograd.Function):
    """Both framed linears and the activation between them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        layouts: tuple[Layout, Layout],
        counts: tuple[int, int],
        thin: tuple[Thin | None, Thin | None],
        ops: GatedOps,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        one, two = layouts
        narrow = torch.cat([x, x @ first[one.out :, : one.inputs].t()], 1)
        gate_up = narrow @ first[: one.out].t()
        wide = ops.gated(gate_up, second[two.out :, : two.inputs])
        ctx.save_for_backward(narrow, gate_up, wide, first, second)
        ctx.layouts, ctx.counts, ctx.thin, ctx.ops = layouts, counts, thin, ops
        return wide @ second[: two.out].t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dy = gradients[0]
        narrow, gate_up, wide, first, second = ctx.saved_tensors
        one, two = ctx.layouts
        if None not in ctx.thin:
            dx, *flats = ctx.thin[0].ops.mlp_backward(
                dy,
                narrow,
                gate_up,
                wide,
                [first, second],
                [thin.rows for thin in ctx.thin],
                [thin.bases for thin in ctx.thin],
                [one.rank, two.rank],
                [one.scale, two.scale],
                [thin.size for thin in ctx.thin],
            )
            ours, others = from_flat(flats[0], one, ctx.counts[0]), from_flat(flats[1], two, ctx.counts[1])
            return dx, None, None, None, None, None, None, *ours, *others
        u = dy @ second[: two.out, two.inputs :]
        of_down = factor_gradients(two, dy, u, wide)
        d_act = torch.cat([dy, u], 1) @ second[:, : two.inputs]
        d = ctx.ops.gated_backward(gate_up, d_act, first[: one.out, one.inputs :])
        of_gate_up = factor_gradients(one, d[:, : one.out], d[:, one.out :], narrow)
        dx = d @ first[:, : one.inputs] if ctx.needs_input_grad[0] else None
        ours, others = handed(of_gate_up, ctx.counts[0]), handed(of_down, ctx.counts[1])
        return dx, None, None, None, None, None, None, *ours, *others


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return cast(Callable[..., torch.Tensor], function.apply)(*arguments)
