# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the gated activation, which write beside what a framed linear needs, without a copy.

act = silu(gate) · up, and its gradients. What a compiler makes of these formulas reads its inputs twice in
the backward pass (once for each half of the result) and copies an activation to put an adapter's part beside
it. Here every element is read once and written once. Loaded where Triton and a GPU are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_up, out, width, in_stride, out_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * in_stride + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + width + column, mask=inside).to(tl.float32)
    act = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + column, act.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_backward(  # type: ignore[no-untyped-def]
    gate_up, d_act, out, act, width, in_stride, d_stride, out_stride, act_stride,
    recompute: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * in_stride + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + width + column, mask=inside).to(tl.float32)
    d = tl.load(d_act + row * d_stride + column, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = d * gate * sigmoid
    tl.store(out + row * out_stride + column, d_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * out_stride + width + column, d_up.to(out.dtype.element_ty), mask=inside)
    if recompute:
        # As the forward pass has it, bit for bit.
        again = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(act + row * act_stride + column, again.to(act.dtype.element_ty), mask=inside)


def adjacent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension's elements side by side, of whatever other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _grid(tokens: int, width: int) -> tuple[int, int]:
    return tokens, triton.cdiv(width, _BLOCK)


@torch.library.custom_op("lora_suite::gated", mutates_args=())
def gated(gate_up: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[act, act·aᵀ] [tokens, width + R] of gate_up [tokens, 2 · width] and a [R, width], where R may be 0."""
    tokens, width, rank = len(gate_up), gate_up.shape[1] // 2, len(a)
    out = gate_up.new_empty(tokens, width + rank)
    _gated[_grid(tokens, width)](
        gate_up, out, width, gate_up.stride(0), out.stride(0), block=_BLOCK, num_warps=_WARPS
    )
    if rank:
        torch.mm(out[:, :width], a.t(), out=out[:, width:])
    return out


@gated.register_fake
def _(gate_up: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2 + len(a))


def gated_gradient(
    gate_up: torch.Tensor, d_act: torch.Tensor, room: int, act: torch.Tensor | None
) -> torch.Tensor:
    """The gradient by gate_up [tokens, 2 · width] from that by act, beside `room` columns not yet written.

    act [tokens, width]: where act is to be written anew, if anywhere; it may be d_act itself.
    """
    tokens, twice = gate_up.shape
    out = gate_up.new_empty(tokens, twice + room)
    again = d_act if act is None else act
    _gated_backward[_grid(tokens, twice // 2)](
        gate_up, d_act, out, again, twice // 2,
        gate_up.stride(0), d_act.stride(0), out.stride(0), again.stride(0),
        recompute=act is not None, block=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return out


@torch.library.custom_op("lora_suite::gated_backward", mutates_args=())
def gated_backward(
    gate_up: torch.Tensor, d_act: torch.Tensor, b: torch.Tensor, recompute: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[d, d·b] [tokens, 2 · width + R], where d is the gradient by gate_up [tokens, 2 · width]; and act anew.

    d_act: the gradient by act [tokens, width]; b [2 · width, R], where R may be 0. Of act there are no rows
    unless `recompute`.
    """
    tokens, twice = gate_up.shape
    act = gate_up.new_empty(tokens if recompute else 0, twice // 2)
    out = gated_gradient(gate_up, d_act, b.shape[1], act if recompute else None)
    if b.shape[1]:
        torch.mm(out[:, :twice], b, out=out[:, twice:])
    return out, act


@gated_backward.register_fake
def _(
    gate_up: torch.Tensor, d_act: torch.Tensor, b: torch.Tensor, recompute: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, twice = gate_up.shape
    out = gate_up.new_empty(tokens, twice + b.shape[1])
    return out, gate_up.new_empty(tokens if recompute else 0, twice // 2)
