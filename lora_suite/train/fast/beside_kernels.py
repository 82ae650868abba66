# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of [x, x·Aᵀ], what a framed linear takes of an x that no kernel of ours makes.

A library's product reads x once more than the copy does, splits the features among programs, and sums their
parts after it. Here a program has all features of a few tokens: it copies them, and multiplies them on the
way. Loaded where Triton and a GPU are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lora_suite.train.fast.kernels import adjacent

_MOST_COLUMNS = 32
"""With more columns the factor, which every program reads, is no longer small beside its tokens."""


class Tile(NamedTuple):
    """Tokens and features that a program holds at a time, its warps and its loads under way.

    Of elements of two bytes; of larger ones it is half as many features.
    """

    tokens: int
    features: int
    warps: int
    stages: int

    def of(self, dtype: torch.dtype) -> Tile:
        """The tile for elements of a dtype: of as many bytes."""
        return self._replace(features=2 * self.features // dtype.itemsize)


TILES = {16: Tile(64, 128, 4, 5), 32: Tile(32, 256, 4, 4)}
"""By the columns."""

_COPY = 2048
"""Elements that a program copies where it does nothing else."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy(x, out, width, x_stride, out_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    tl.store(out + row * out_stride + column, tl.load(x + row * x_stride + column, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _beside(  # type: ignore[no-untyped-def]
    x, a, out, tokens, width, x_stride, a_stride, out_stride,
    frame: tl.constexpr, padded: tl.constexpr, rows_held: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """For a few tokens: the copy of x, and all of t beside it."""
    token = (tl.program_id(0) * rows_held + tl.arange(0, rows_held)).to(tl.int64)
    live = token < tokens
    column = tl.arange(0, padded)
    used = column < frame
    sums = tl.zeros((rows_held, padded), tl.float32)
    for start in range(0, width, block):
        feature = start + tl.arange(0, block)
        inside = feature < width
        mask = live[:, None] & inside[None, :]
        states = tl.load(x + token[:, None] * x_stride + feature[None, :], mask=mask, other=0.0)
        tl.store(out + token[:, None] * out_stride + feature[None, :], states, mask=mask)
        place = a + column.to(tl.int64)[:, None] * a_stride + feature[None, :]
        factor = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(states, tl.trans(factor), sums, input_precision="ieee")
    place = out + token[:, None] * out_stride + width + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=live[:, None] & used[None, :])


def columns_held(frame: int) -> int:
    """What a program holds of a frame's columns: as many as a matrix unit multiplies."""
    return max(16, int(triton.next_power_of_2(frame)))


@torch.library.custom_op("lora_suite::beside", mutates_args=())
def beside(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[x, x·aᵀ] [tokens, inputs + R] of x [tokens, inputs] and a [R, inputs]."""
    x = adjacent(x)
    (tokens, width), frame = x.shape, len(a)
    out = x.new_empty(tokens, width + frame)
    if frame > _MOST_COLUMNS:
        _copy[(tokens, triton.cdiv(width, _COPY))](
            x, out, width, x.stride(0), out.stride(0), block=_COPY, num_warps=4
        )
        torch.mm(x, a.t(), out=out[:, width:])
        return out
    padded = columns_held(frame)
    tile = TILES[padded].of(x.dtype)
    _beside[(triton.cdiv(tokens, tile.tokens),)](
        x, a, out, tokens, width, x.stride(0), a.stride(0), out.stride(0),
        frame=frame, padded=padded, rows_held=tile.tokens, block=tile.features,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@beside.register_fake
def _(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x), x.shape[1] + len(a))
