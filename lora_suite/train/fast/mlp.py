# SPDX-License-Identifier: Apache-2.0
"""The gated MLP as one operation, so that its wide intermediates are made with room for the adapters' parts.

    forward     gu = [x, t₁]·[W₁, sB₁]ᵀ,   wide = [act, act·A₂ᵀ],   y = wide·[W₂, sB₂]ᵀ
    backward    u₂ = dy·sB₂,   d_act = [dy, u₂]·[W₂; A₂],   wide' = [d, d·sB₁],   dx = wide'·[W₁; A₁]

with act = silu(gate) · up and d its gradient by gate and up. See `linears` for the frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional

from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.entry import Norm, NormOps, by_kernels, entered, left, normed
from lora_suite.train.fast.linears import (
    Beside,
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
            pair = _pair(gate_up, down, ops)
            factors = (*gate_up.factors, *down.factors)
            apply = cast("Callable[..., torch.Tensor]", _FramedMlp.apply)
            return apply(x, gate_up.matrix, down.matrix, pair, gate_up.beside, *factors)
    return cast(torch.Tensor, down(gated_activation(gate_up(x), None)))


def normed_mlp(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    gate_up: StackedLinear | FramedLinear,
    down: StackedLinear | FramedLinear,
    ops: GatedOps | None,
    tp: TensorParallel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_mlp` of the normalised sum of x and residual [tokens, hidden], and the sum itself.

    Under tensor parallelism the first is this rank's part of a sum.
    """
    if (
        ops is not None
        and by_kernels(norm)
        and tp.size == 1
        and isinstance(gate_up, FramedLinear)
        and isinstance(down, FramedLinear)
        and gate_up.enabled
        and gate_up.bias is None
        and down.bias is None
    ):
        pair = _pair(gate_up, down, ops)
        factors = (*gate_up.factors, *down.factors)
        apply = cast("Callable[..., tuple[torch.Tensor, torch.Tensor]]", _NormedMlp.apply)
        return apply(x, residual, *norm, gate_up.matrix, down.matrix, pair, *factors)
    normal, states = normed(x, residual, norm)
    return gated_mlp(tp.enter(normal), gate_up, down, ops), states


def gated_activation(gate_up: torch.Tensor, ops: GatedOps | None) -> torch.Tensor:
    """silu(gate) · up of [gate, up] [tokens, 2 · width]; ops: kernels to use in training."""
    if ops is not None and torch.is_grad_enabled():
        return cast("Callable[..., torch.Tensor]", _Gated.apply)(gate_up, ops)
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


class _Pair(NamedTuple):
    """What both framed linears of an MLP and the activation between them have besides tensors.

    counts: how many tensors the gradients of each one's factors are.
    """

    layouts: tuple[Layout, Layout]
    counts: tuple[int, int]
    thin: tuple[Thin | None, Thin | None]
    ops: GatedOps


def _pair(gate_up: FramedLinear, down: FramedLinear, ops: GatedOps) -> _Pair:
    counts = (len(gate_up.factors), len(down.factors))
    return _Pair((gate_up.layout, down.layout), counts, (gate_up.thin, down.thin), ops)


def _forward(
    pair: _Pair, narrow: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gu, [act, t₂] and y of narrow = [x, t₁]."""
    one, two = pair.layouts
    gate_up = narrow @ first[: one.out].t()
    wide = pair.ops.gated(gate_up, second[two.out :, : two.inputs])
    return gate_up, wide, wide @ second[: two.out].t()


def _backward(
    pair: _Pair,
    dy: torch.Tensor,
    narrow: torch.Tensor,
    gate_up: torch.Tensor,
    wide: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    needed: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """dx, where it is needed, and the gradients of the factors of both linears."""
    one, two = pair.layouts
    gate, down = pair.thin
    if gate is not None and down is not None:
        made, ours, others = gate.ops.mlp_backward(
            dy,
            narrow,
            gate_up,
            wide,
            [first, second],
            [gate.rows, down.rows],
            [gate.bases, down.bases],
            [one.rank, two.rank],
            [one.scale, two.scale],
            [gate.size, down.size],
        )
        return made, [*from_flat(ours, one, pair.counts[0]), *from_flat(others, two, pair.counts[1])]
    u = dy @ second[: two.out, two.inputs :]
    of_down = factor_gradients(two, dy, u, wide)
    d_act = torch.cat([dy, u], 1) @ second[:, : two.inputs]
    d = pair.ops.gated_backward(gate_up, d_act, first[: one.out, one.inputs :])
    of_gate_up = factor_gradients(one, d[:, : one.out], d[:, one.out :], narrow)
    dx = d @ first[:, : one.inputs] if needed else None
    return dx, [*handed(of_gate_up, pair.counts[0]), *handed(of_down, pair.counts[1])]


class _FramedMlp(torch.autograd.Function):
    """Both framed linears and the activation between them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        pair: _Pair,
        beside: Beside,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        one = pair.layouts[0]
        narrow = beside(x, first[one.out :, : one.inputs])
        gate_up, wide, y = _forward(pair, narrow, first, second)
        ctx.save_for_backward(narrow, gate_up, wide, first, second)
        ctx.pair = pair
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        narrow, gate_up, wide, first, second = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        dx, factors = _backward(ctx.pair, gradients[0], narrow, gate_up, wide, first, second, needed)
        return dx, None, None, None, None, *factors


class _NormedMlp(torch.autograd.Function):
    """The same of the normalised sum of x and residual, and the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        norm: NormOps,
        first: torch.Tensor,
        second: torch.Tensor,
        pair: _Pair,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        one = pair.layouts[0]
        narrow, kept, states = entered(x, residual, weight, eps, norm, first[one.out :, : one.inputs])
        gate_up, wide, y = _forward(pair, narrow, first, second)
        ctx.save_for_backward(*kept, narrow, gate_up, wide, first, second)
        ctx.norm, ctx.pair = norm, pair
        return y, states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        states, inverses, weight, narrow, gate_up, wide, first, second = ctx.saved_tensors
        made, factors = _backward(ctx.pair, gradients[0], narrow, gate_up, wide, first, second, True)
        d_normal, kept = cast(torch.Tensor, made), (states, inverses, weight)
        dx, d_weight = left(d_normal, gradients[1], kept, ctx.norm, ctx.needs_input_grad[2])
        return dx, dx, d_weight, None, None, None, None, None, *factors
