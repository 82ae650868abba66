# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `expert_rows`: every element is read once and written once, without atomics.

`last` is where the rows end that are of this rank's experts, read on the device; the others are not touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_suite.train.fast.kernels import adjacent

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _gather(x, order, last, out, choices, width, x_stride, out_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < tl.where(row < tl.load(last), width, 0)
    token = tl.load(order + row) // choices
    values = tl.load(x + token * x_stride + column, mask=inside)
    tl.store(out + row * out_stride + column, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _relu2(h, weights, order, last, out, width, h_stride, out_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < tl.where(row < tl.load(last), width, 0)
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    positive = tl.maximum(tl.load(h + row * h_stride + column, mask=inside).to(tl.float32), 0.0)
    act = positive * positive * weight
    tl.store(out + row * out_stride + column, act.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _relu2_backward(  # type: ignore[no-untyped-def]
    h, d_act, weights, order, last, out, d_weights, width, h_stride, d_stride, out_stride, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    filled = tl.where(row < tl.load(last), width, 0)
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < filled
        positive = tl.maximum(
            tl.load(h + row * h_stride + column, mask=inside, other=0.0).to(tl.float32), 0.0
        )
        d = tl.load(d_act + row * d_stride + column, mask=inside, other=0.0).to(tl.float32)
        total += d * positive * positive
        d_h = 2.0 * d * positive * weight
        tl.store(out + row * out_stride + column, d_h.to(out.dtype.element_ty), mask=inside)
    tl.store(d_weights + row, tl.sum(total, 0).to(d_weights.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    rows, places, last, out, width, rows_stride, out_stride, choices: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(choices):
        place = tl.load(places + token * choices + choice)
        ours = column < tl.where(place < tl.load(last), width, 0)
        total += tl.load(rows + place * rows_stride + column, mask=ours, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, _BLOCK)


def gather(x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, choices: int, out: torch.Tensor) -> None:
    """Write the rows of x [tokens, width] that `order` [rows] names to the first columns of out."""
    width = x.shape[1]
    x = adjacent(x)
    _gather[_grid(len(order), width)](
        x, order, ends[-1:], out, choices, width, x.stride(0), out.stride(0), block=_BLOCK
    )


def relu2(
    h: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
) -> None:
    """Write weight · relu(h)² to the first columns of out; h [rows, width]."""
    width = h.shape[1]
    weights = weights.contiguous()
    _relu2[_grid(len(h), width)](
        h, weights, order, ends[-1:], out, width, h.stride(0), out.stride(0), block=_BLOCK
    )


def relu2_backward(
    h: torch.Tensor,
    d: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    d_weights: torch.Tensor,
) -> None:
    """Write the gradients by h to the first columns of out and those by the weights to d_weights [rows]."""
    width = h.shape[1]
    weights = weights.contiguous()
    _relu2_backward[(len(h),)](
        h,
        d,
        weights,
        order,
        ends[-1:],
        out,
        d_weights,
        width,
        h.stride(0),
        d.stride(0),
        out.stride(0),
        block=_BLOCK,
    )


def combine(
    rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, choices: int, out: torch.Tensor
) -> torch.Tensor:
    """Write each token's sum of rows to out [tokens, width]; return out."""
    tokens, width = out.shape
    _combine[_grid(tokens, width)](
        rows, places, ends[-1:], out, width, rows.stride(0), out.stride(0), choices=choices, block=_BLOCK
    )
    return out
