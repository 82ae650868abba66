# SPDX-License-Identifier: Apache-2.0
"""How states come before linears: a residual's sum, its norm, and room for the adapters' part beside it.

    h = x + residual,   n = h / rms(h) · w,   [n, t] with t = n·Aᵀ

A framed linear multiplies [n, t] (see `linears`). Made by a kernel, n is written where it is read from, once,
and kept for the backward pass, which otherwise makes it anew and copies it. Or nothing but t is kept: the
kernel of the norm's gradient reads h and 1 / rms(h) anyway, and writes n anew for the gradients of weights or
factors, which then come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.linears import (
    FramedLinear,
    Layout,
    StackedLinear,
    Thin,
    parted,
    pulled,
    pushed,
    room_alone,
)


@dataclass(frozen=True)
class NormOps:
    """The operations around a norm: `add_norm`, `norm_backward` and `norm_again` of `entry_kernels`.

    recompute: whether n is made anew in the backward pass instead of being kept.
    """

    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    again: Callable[..., torch.Tensor]
    recompute: bool = False


def norm_ops(recompute: bool = False) -> NormOps:
    """The kernels; where Triton and a GPU are."""
    from lora_suite.train.fast import entry_kernels as kernels

    return NormOps(kernels.add_norm, kernels.norm_backward, kernels.norm_again, recompute)


Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a norm for its gradient: h, 1 / rms(h) and the weight."""


class Norm(NamedTuple):
    """Weight [hidden] and ε of a norm; ops: kernels to use in training."""

    weight: torch.Tensor
    eps: float
    ops: NormOps | None


def by_kernels(norm: Norm) -> bool:
    """Whether a norm is computed by its kernels now."""
    return norm.ops is not None and torch.is_grad_enabled()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / root mean square of its last dim, times weight; in float32 whatever x is, as transformers does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def normed(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of x and residual [tokens, hidden], and the sum itself."""
    if by_kernels(norm):
        normal, states = _apply(_Norm, x, residual, *norm)
        return normal, states
    states = x if residual is None else x + residual
    return rms_norm(states, norm.weight, norm.eps), states


def normed_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    linear: StackedLinear | FramedLinear,
    tp: TensorParallel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The linear of the normalised sum of x and residual [tokens, hidden], and the sum itself.

    Under tensor parallelism the linear is split by output.
    """
    if by_kernels(norm):
        again = made_anew(norm, x, residual)
        if isinstance(linear, FramedLinear) and linear.enabled:
            frame = (linear.matrix, linear.layout, linear.thin)
            y, states = _apply(_NormedFramed, x, residual, *norm, again, tp, *frame, *linear.factors)
            return (y if linear.bias is None else y + linear.bias), states
        if again and isinstance(linear, StackedLinear) and linear.weight.requires_grad:
            y, states = _apply(_NormedStacked, x, residual, *norm, tp, linear.weight)
            return (y if linear.bias is None else y + linear.bias), states
    normal, states = normed(x, residual, norm)
    return linear(tp.enter(normal)), states


def made_anew(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether n is made anew in the backward pass: with the norm's gradient, where there is one."""
    if norm.ops is None or not norm.ops.recompute:
        return False
    return any(each is not None and each.requires_grad for each in (x, residual, norm.weight))


def entered(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    ops: NormOps,
    a: torch.Tensor,
) -> tuple[torch.Tensor, Kept, torch.Tensor]:
    """[n, t]; what `left` needs for the gradient; and the sum h for whoever comes after.

    For the forward pass of an operation that hands h on, so that its gradient comes back to the same kernel.
    """
    wide, states, inverse = ops.add_norm(x, residual, weight, eps, a)
    if residual is None:
        return wide, (x, inverse, weight), x.view_as(x)
    return wide, (states, inverse, weight), states


def left(
    d_normal: torch.Tensor,
    d_states: torch.Tensor,
    kept: Kept,
    ops: NormOps,
    weighted: bool,
    again: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradient by x, which is residual's, too; by the norm's weight if `weighted`; n anew if `again`.

    d_normal, d_states: by n, and by h of what comes after.
    """
    d_x, d_weight, normal = ops.backward(d_normal, d_states, *kept, weighted, again)
    return d_x, d_weight if weighted else None, normal if again else None


class _Norm(torch.autograd.Function):
    """n and h."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        ops: NormOps,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normal, kept, states = entered(x, residual, weight, eps, ops, weight.new_empty(0, len(weight)))
        ctx.save_for_backward(*kept)
        ctx.ops, ctx.summed = ops, residual is not None
        return normal, states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_normal, d_states = gradients
        weighted = ctx.needs_input_grad[2]
        d_x, d_weight, _ = left(d_normal, d_states, ctx.saved_tensors, ctx.ops, weighted, False)
        return d_x, d_x if ctx.summed else None, d_weight, None, None


class _NormedFramed(torch.autograd.Function):
    """y = [n, t]·[W, s·B]ᵀ and h; again: whether n is made anew in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        ops: NormOps,
        again: bool,
        tp: TensorParallel,
        matrix: torch.Tensor,
        layout: Layout,
        thin: Thin | None,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a = matrix[layout.out :, : layout.inputs]
        wide, kept, states = entered(x, residual, weight, eps, ops, a)
        ctx.save_for_backward(*kept, room_alone(wide, layout) if again else wide, matrix)
        ctx.ops, ctx.summed, ctx.again, ctx.tp = ops, residual is not None, again, tp
        ctx.layout, ctx.thin, ctx.count = layout, thin, len(factors)
        return wide @ matrix[: layout.out].t(), states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        *kept, wide, matrix = ctx.saved_tensors
        layout, thin = ctx.layout, ctx.thin
        normal, t = parted(wide, layout)
        t = wide if ctx.again else t
        ours = pulled(gradients[0], t, matrix, layout, thin)
        d_x = d_weight = anew = None
        # Nothing before the first layer trains with LoRA.
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_normal = ctx.tp.summed(ours.beside @ matrix[:, : layout.inputs])
            weighted = ctx.needs_input_grad[2]
            d_x, d_weight, anew = left(d_normal, gradients[1], tuple(kept), ctx.ops, weighted, ctx.again)
        factors = pushed(ours, normal if anew is None else anew, layout, thin, ctx.count)
        return d_x, d_x if ctx.summed else None, d_weight, *7 * (None,), *factors


class _NormedStacked(torch.autograd.Function):
    """y = n·Wᵀ of a weight that trains, and h; n is made anew in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        ops: NormOps,
        tp: TensorParallel,
        matrix: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normal, kept, states = entered(x, residual, weight, eps, ops, weight.new_empty(0, len(weight)))
        ctx.save_for_backward(*kept, matrix)
        ctx.ops, ctx.summed, ctx.tp = ops, residual is not None, tp
        return normal @ matrix.t(), states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        *kept, matrix = ctx.saved_tensors
        dy, d_states = gradients
        d_normal, weighted = ctx.tp.summed(dy @ matrix), ctx.needs_input_grad[2]
        d_x, d_weight, anew = left(d_normal, d_states, tuple(kept), ctx.ops, weighted, True)
        assert anew is not None, "asked for"
        return d_x, d_x if ctx.summed else None, d_weight, None, None, None, dy.t() @ anew


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    apply = cast("Callable[..., tuple[torch.Tensor, torch.Tensor]]", function.apply)
    return apply(*arguments)
