# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel of the thin product of the forward pass, t = x·Aᵀ, which reads x once and may copy it.

A library splits the features of so thin a product among programs, clears room for their parts before it and
sums them after it: three kernels. Here a program has all features of a few tokens. Loaded where Triton and a
GPU are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

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


TILES = {16: Tile(32, 256, 4, 6), 32: Tile(32, 256, 4, 4)}
"""By the columns."""
COPYING = {16: Tile(32, 256, 4, 6), 32: Tile(32, 256, 4, 4)}
"""Where x is copied on the way."""

_COPY = 2048
"""Elements that a program copies where it does nothing else."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy(x, out, width, x_stride, out_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    tl.store(out + row * out_stride + column, tl.load(x + row * x_stride + column, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    x, a, out, tokens, width, x_stride, a_stride, out_stride,
    copied: tl.constexpr, frame: tl.constexpr, padded: tl.constexpr, rows_held: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """For a few tokens: all of t; and the copy of x before it."""
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
        if copied:
            tl.store(out + token[:, None] * out_stride + feature[None, :], states, mask=mask)
        place = a + column.to(tl.int64)[:, None] * a_stride + feature[None, :]
        factor = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(states, tl.trans(factor), sums, input_precision="ieee")
    place = out + token[:, None] * out_stride + width + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=live[:, None] & used[None, :])


def columns_held(frame: int) -> int:
    """What a program holds of a frame's columns: as many as a matrix unit multiplies."""
    return max(16, int(triton.next_power_of_2(frame)))


def project(x: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """Make out = [x, x·aᵀ] [tokens, width + R], of which it may hold x already; a [R, width]."""
    (tokens, width), frame, copied = x.shape, len(a), x.data_ptr() != out.data_ptr()
    if frame > _MOST_COLUMNS:
        if copied:
            _copy[(tokens, triton.cdiv(width, _COPY))](
                x, out, width, x.stride(0), out.stride(0), block=_COPY, num_warps=4
            )
        torch.mm(x, a.t(), out=out[:, width:])
        return
    padded = columns_held(frame)
    tile = (COPYING if copied else TILES)[padded].of(x.dtype)
    _project[(triton.cdiv(tokens, tile.tokens),)](
        x, a, out, tokens, width, x.stride(0), a.stride(0), out.stride(0),
        copied=copied, frame=frame, padded=padded, rows_held=tile.tokens, block=tile.features,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
