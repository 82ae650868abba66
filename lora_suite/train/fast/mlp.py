# SPDX-License-Identifier: Apache-2.0
"""The gated MLP as one operation, so that its wide intermediates are made with room for the adapters' parts.

    forward     gu = [x, t₁]·[W₁, sB₁]ᵀ,   wide = [act, act·A₂ᵀ],   y = wide·[W₂, sB₂]ᵀ
    backward    u₂ = dy·sB₂,   d_act = [dy, u₂]·[W₂; A₂],   wide' = [d, d·sB₁],   dx = wide'·[W₁; A₁]

with act = silu(gate) · up and d its gradient by gate and up. See `linears` for the frames. act may be
kept for dA₂ or, where a weight trains, for dW₂; or the kernel that reads gate and up for d writes it anew.
Where the norm before is part of it gate and up, too, may be made anew from the sum that the norm keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional

from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.entry import (
    Norm,
    NormOps,
    by_kernels,
    entered,
    left,
    made_anew,
    normed,
    normed_linear,
)
from lora_suite.train.fast.linears import (
    Beside,
    FramedLinear,
    Layout,
    Pulled,
    StackedLinear,
    Thin,
    from_flat,
    gradients_of_b,
    parted,
    pulled,
    pushed,
    room_alone,
)


@dataclass(frozen=True)
class GatedOps:
    """The two operations around the gated activation: `kernels.gated` and `kernels.gated_backward`.

    recompute: whether the activation is made anew in the backward pass instead of being kept. products:
    whether gate and up are, too.
    """

    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated_backward: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]
    ]
    recompute: bool = False
    products: bool = False


def kernel_ops(dtype: torch.dtype, recompute: bool = False) -> GatedOps | None:
    """The kernels of a GPU; None for float64, since they compute in float32."""
    if dtype == torch.float64:
        return None
    from lora_suite.train.fast import kernels

    return GatedOps(kernels.gated, kernels.gated_backward, recompute)


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
    framed = _both_framed(gate_up, down)
    if ops is not None and torch.is_grad_enabled() and framed is not None:
        one, two = framed
        apply = cast("Callable[..., torch.Tensor]", _FramedMlp.apply)
        pair = _pair(one, two, ops)
        return apply(x, one.matrix, two.matrix, pair, one.beside, *one.factors, *two.factors)
    return _down(gate_up(x), gate_up, down, ops)


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
    if not by_kernels(norm):
        normal, total = normed(x, residual, norm)
        return gated_mlp(tp.enter(normal), gate_up, down, ops), total
    framed = _both_framed(gate_up, down)
    if ops is not None and framed is not None:
        one, two = framed
        apply = cast("Callable[..., tuple[torch.Tensor, torch.Tensor]]", _NormedMlp.apply)
        again, pair = made_anew(norm, x, residual), _pair(one, two, ops)
        factors = (*one.factors, *two.factors)
        return apply(x, residual, *norm, again, tp, one.matrix, two.matrix, pair, *factors)
    states, total = normed_linear(x, residual, norm, gate_up, tp)
    return _down(states, gate_up, down, ops), total


def _both_framed(
    gate_up: StackedLinear | FramedLinear, down: StackedLinear | FramedLinear
) -> tuple[FramedLinear, FramedLinear] | None:
    """The two, if they can be one operation with the activation between them."""
    if not isinstance(gate_up, FramedLinear) or not isinstance(down, FramedLinear):
        return None
    fits = gate_up.enabled and gate_up.bias is None and down.bias is None
    return (gate_up, down) if fits else None


def _down(
    states: torch.Tensor,
    gate_up: StackedLinear | FramedLinear,
    down: StackedLinear | FramedLinear,
    ops: GatedOps | None,
) -> torch.Tensor:
    """The activation and the second linear of what the first gave, where the two are not one operation."""
    if (
        ops is None
        or not isinstance(gate_up, StackedLinear)
        or not isinstance(down, StackedLinear)
        or gate_up.bias is not None
        or down.bias is not None
    ):
        return cast(torch.Tensor, down(gated_activation(states, None)))
    if ops.recompute and down.weight.requires_grad and torch.is_grad_enabled():
        return cast("Callable[..., torch.Tensor]", _GatedStacked.apply)(states, down.weight, ops)
    return cast(torch.Tensor, down(gated_activation(states, ops)))


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
        none = gate_up.new_empty(gate_up.shape[1], 0)
        return ctx.ops.gated_backward(gate_up, gradients[0], none, False)[0], None


class _GatedStacked(torch.autograd.Function):
    """(silu(gate) · up)·Wᵀ of a weight that trains; the activation is made anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor, ops: GatedOps) -> torch.Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.ops = ops
        return ops.gated(gate_up, weight.new_empty(0, weight.shape[1])) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        gate_up, weight = ctx.saved_tensors
        none = gate_up.new_empty(gate_up.shape[1], 0)
        d, act = ctx.ops.gated_backward(gate_up, dy @ weight, none, True)
        return d, dy.t() @ act, None


class _Pair(NamedTuple):
    """What both framed linears of an MLP and the activation between them have besides tensors.

    counts: how many tensors the gradients of each one's factors are. thin: of both, or of neither.
    """

    layouts: tuple[Layout, Layout]
    counts: tuple[int, int]
    thin: tuple[Thin, Thin] | None
    ops: GatedOps

    @property
    def first(self) -> Thin | None:
        """The first linear's thin operations."""
        return None if self.thin is None else self.thin[0]


def _pair(gate_up: FramedLinear, down: FramedLinear, ops: GatedOps) -> _Pair:
    counts = (len(gate_up.factors), len(down.factors))
    thin = None if gate_up.thin is None or down.thin is None else (gate_up.thin, down.thin)
    return _Pair((gate_up.layout, down.layout), counts, thin, ops)


def _forward(
    pair: _Pair, narrow: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gu, what is kept of [act, t₂], and y, of narrow = [x, t₁]."""
    one, two = pair.layouts
    gate_up = narrow @ first[: one.out].t()
    wide = pair.ops.gated(gate_up, second[two.out :, : two.inputs])
    kept = room_alone(wide, two) if pair.ops.recompute else wide
    return gate_up, kept, wide @ second[: two.out].t()


def _backward(
    pair: _Pair,
    dy: torch.Tensor,
    t: torch.Tensor,
    gate_up: torch.Tensor,
    kept: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
) -> tuple[Pulled, list[torch.Tensor]]:
    """Of the first linear what needs no x; and the gradients of the second one's factors."""
    one, two = pair.layouts
    count = pair.counts[1]
    act, t_down = (None, kept) if pair.ops.recompute else parted(kept, two)
    if pair.thin is not None:
        gate, down = pair.thin
        made, vectors, others = gate.ops.mlp_backward(
            dy,
            t,
            gate_up,
            act,
            t_down,
            [first, second],
            [gate.rows, down.rows],
            down.bases,
            [one.rank, two.rank],
            [one.scale, two.scale],
            [gate.size, down.size],
        )
        return Pulled(made, (vectors,)), from_flat(others, two, count)
    of_down = pulled(dy, t_down, second, two, None)
    d_act = of_down.beside @ second[:, : two.inputs]
    d, again = pair.ops.gated_backward(gate_up, d_act, first[: one.out, one.inputs :], act is None)
    ours = Pulled(d, gradients_of_b(d[:, : one.out], t, one))
    return ours, pushed(of_down, again if act is None else act, two, None, count)


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
        gate_up, kept, y = _forward(pair, narrow, first, second)
        ctx.save_for_backward(x, room_alone(narrow, one), gate_up, kept, first, second)
        ctx.pair = pair
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        pair: _Pair = ctx.pair
        one, first = pair.layouts[0], saved[3]
        ours, others = _backward(pair, gradients[0], *saved)
        dx = ours.beside @ first[:, : one.inputs] if ctx.needs_input_grad[0] else None
        factors = [*pushed(ours, x, one, pair.first, pair.counts[0]), *others]
        return dx, None, None, None, None, *factors


class _NormedMlp(torch.autograd.Function):
    """The same of the normalised sum of x and residual, and the sum; again: as of `made_anew`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        norm: NormOps,
        again: bool,
        tp: TensorParallel,
        first: torch.Tensor,
        second: torch.Tensor,
        pair: _Pair,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        one = pair.layouts[0]
        narrow, of_norm, states = entered(x, residual, weight, eps, norm, first[one.out :, : one.inputs])
        gate_up, kept, y = _forward(pair, narrow, first, second)
        of_first = () if pair.ops.products else (room_alone(narrow, one) if again else narrow, gate_up)
        ctx.save_for_backward(*of_norm, kept, first, second, *of_first)
        ctx.norm, ctx.eps, ctx.pair, ctx.again, ctx.tp = norm, eps, pair, again, tp
        return y, states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        states, inverses, weight, kept, first, second, *of_first = ctx.saved_tensors
        pair: _Pair = ctx.pair
        one, again = pair.layouts[0], ctx.again
        if of_first:
            narrow, gate_up = of_first
            normal, t = parted(narrow, one)
            t = narrow if again else t
        else:
            a = first[one.out :, : one.inputs]
            narrow, again = ctx.norm.again(gradients[0], states, weight, ctx.eps, a), False
            gate_up = narrow @ first[: one.out].t()
            normal, t = parted(narrow, one)
        ours, others = _backward(pair, gradients[0], t, gate_up, kept, first, second)
        d_normal, of_norm = ctx.tp.summed(ours.beside @ first[:, : one.inputs]), (states, inverses, weight)
        weighted = ctx.needs_input_grad[2]
        dx, d_weight, anew = left(d_normal, gradients[1], of_norm, ctx.norm, weighted, again)
        normal = normal if anew is None else anew
        factors = [*pushed(ours, normal, one, pair.first, pair.counts[0]), *others]
        return dx, dx, d_weight, *7 * (None,), *factors
