# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of what stands before a framed linear: a residual's sum, a norm, and room beside the result.

A row of states stays in registers from its sum to its norm, and each tensor is read and written once. What
a compiler makes of the formulas writes n twice, once for the thin product and once beside its room, and makes
it anew in the backward pass. Loaded where Triton and a GPU are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_suite.train.fast.kernels import adjacent

_PROGRAMS = 512
"""Among how many programs the tokens are split where the norm's weight trains: each has a part of a sum."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, states, out, inverses, width, eps, x_stride, residual_stride, out_stride,
    summed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if summed:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(states.dtype.element_ty)
        tl.store(states + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(inverses + row, inverse)
    # Rounded before the weight, as the formula is.
    normal = (value * inverse).to(out.dtype.element_ty).to(tl.float32)
    scaled = normal * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    d_normal, d_states, states, inverses, weight, d_x, parts, again, tokens, width, per_program,
    d_normal_stride, d_states_stride, states_stride,
    weighted: tl.constexpr, recompute: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((block,), tl.float32)
    for token in range(program * per_program, min(tokens, (program + 1) * per_program)):
        row = tl.cast(token, tl.int64)
        d = tl.load(d_normal + row * d_normal_stride + column, mask=inside, other=0.0).to(tl.float32)
        after = tl.load(d_states + row * d_states_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(states + row * states_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        normal, scaled = value * inverse, d * factor
        mean = tl.sum(normal * scaled, 0) / width
        result = (scaled - normal * mean) * inverse + after
        tl.store(d_x + row * width + column, result.to(d_x.dtype.element_ty), mask=inside)
        rounded = normal.to(d_x.dtype.element_ty).to(tl.float32)
        if recompute:
            tl.store(again + row * width + column, (rounded * factor).to(again.dtype.element_ty), mask=inside)
        if weighted:
            d_weight += d * rounded
    if weighted:
        tl.store(parts + program.to(tl.int64) * width + column, d_weight, mask=inside)


def _warps(block: int) -> int:
    """So that a thread has 16 elements of a row, of 4 to 16 warps."""
    return min(16, max(4, block // 512))


@torch.library.custom_op("lora_suite::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, n·aᵀ] [tokens, hidden + R], h [tokens, hidden] and 1 / rms(h) [tokens] in float32.

    h = x + residual, n = h / rms(h) · weight; without a residual, x is h, and what is returned for it is
    [0, hidden]. a [R, hidden], where R may be 0.
    """
    x = adjacent(x)
    tokens, width = x.shape
    other = x if residual is None else adjacent(residual)
    states = x.new_empty(0 if residual is None else tokens, width)
    out = x.new_empty(tokens, width + len(a))
    inverses = x.new_empty(tokens, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _add_norm[(tokens,)](
        x, other, weight, states, out, inverses, width, eps, x.stride(0), other.stride(0), out.stride(0),
        summed=residual is not None, block=block, num_warps=_warps(block),
    )  # fmt: skip
    if len(a):
        torch.mm(out[:, :width], a.t(), out=out[:, width:])
    return out, states, inverses


@add_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = x.shape
    states = x.new_empty(0 if residual is None else tokens, width)
    return x.new_empty(tokens, width + len(a)), states, x.new_empty(tokens, dtype=torch.float32)


@torch.library.custom_op("lora_suite::norm_again", mutates_args=())
def norm_again(
    after: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, eps: float, a: torch.Tensor
) -> torch.Tensor:
    """[n, t] of h = states once more, in the backward pass.

    after: a gradient. Nothing of it is read, but a compiler that sees it asked for cannot make n in the
    forward pass, and keep it.
    """
    wide: torch.Tensor = add_norm(states, None, weight, eps, a)[0]
    return wide


@norm_again.register_fake
def _(
    after: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, eps: float, a: torch.Tensor
) -> torch.Tensor:
    return states.new_empty(len(states), states.shape[1] + len(a))


@torch.library.custom_op("lora_suite::norm_backward", mutates_args=())
def norm_backward(
    d_normal: torch.Tensor,
    d_states: torch.Tensor,
    states: torch.Tensor,
    inverses: torch.Tensor,
    weight: torch.Tensor,
    weighted: bool,
    recompute: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient by h [tokens, hidden], in two parts' sum, and by weight [hidden] ([0] unless weighted).

    Third n itself, anew, of which there are no rows unless `recompute`. d_normal: by n; d_states: by h of
    whatever else reads it; states = h; inverses: of `add_norm`.
    """
    d_normal, d_states, states = adjacent(d_normal), adjacent(d_states), adjacent(states)
    tokens, width = states.shape
    per_program = triton.cdiv(tokens, _PROGRAMS) if weighted else 1
    programs = triton.cdiv(tokens, per_program)
    d_x = states.new_empty(tokens, width)
    again = states.new_empty(tokens if recompute else 0, width)
    parts = states.new_empty(programs if weighted else 0, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        d_normal, d_states, states, inverses, weight, d_x, parts, again, tokens, width, per_program,
        d_normal.stride(0), d_states.stride(0), states.stride(0),
        weighted=weighted, recompute=recompute, block=block, num_warps=_warps(block),
    )  # fmt: skip
    return d_x, parts.sum(0).to(weight.dtype) if weighted else weight.new_empty(0), again


@norm_backward.register_fake
def _(
    d_normal: torch.Tensor,
    d_states: torch.Tensor,
    states: torch.Tensor,
    inverses: torch.Tensor,
    weight: torch.Tensor,
    weighted: bool,
    recompute: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = states.shape
    d_weight = weight.new_empty(len(weight) if weighted else 0)
    return states.new_empty(tokens, width), d_weight, states.new_empty(tokens if recompute else 0, width)
