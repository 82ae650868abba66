# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the thin products of framed linears, for frames of a few columns.

A thin product [tokens, features]·[features, R] takes as long as reading its wide operand. A library call
reads that once for each product; here every wide tensor is read once for all thin products that need it:

    pull    dy: u = dy·(s·B) and dB = s·dyᵀ·t; and its copy beside room for u, where it has none
    push    x: dA = uᵀ·x

Blocks of features and chunks of tokens go to different programs. What crosses them is summed by a second,
small kernel in a fixed order, so results do not depend on which program runs first. `linears` has the frames
and the names; loaded where Triton and a GPU are.

Where factors' gradients go: one flat vector for each framed linear, A and B of each adapter in turn. `rows`
[entries, 4] says of the features [start, stop) in which column of the frame their adapter begins and where in
the vector the first of them has its row of B; `bases` [adapters] where each A begins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lora_suite.train.fast.beside_kernels import Tile, columns_held
from lora_suite.train.fast.kernels import gated_gradient

_MOST_CHUNKS = 16
"""Into how many parts the tokens are split at most where they are summed over."""


class Pull(NamedTuple):
    """A tile, and how many programs there may be, of which those of one block of features share the tokens.

    So many that each multiprocessor has work till the end; and few, for each writes a part of every sum, and
    waits for its first loads.
    """

    tile: Tile
    programs: int


class Tiles(NamedTuple):
    """Of frames of as many columns as the key says; in_place: where dy stands beside room for u already."""

    pull: Pull
    in_place: Pull
    push: Tile


class SumTile(NamedTuple):
    """Parts that a program holds at a time, at most; its elements, parts counted; of the sum, at least."""

    most: int
    elements: int
    least: int
    warps: int


_SUM = SumTile(8, 2048, 128, 4)

TILES = {
    16: Tiles(Pull(Tile(128, 256, 8, 3), 132), Pull(Tile(64, 512, 8, 3), 132), Tile(64, 64, 4, 5)),
    32: Tiles(Pull(Tile(64, 256, 8, 3), 132), Pull(Tile(64, 128, 8, 3), 396), Tile(64, 64, 4, 3)),
}


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of_b(feature, rows, entries: tl.constexpr, rank: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each feature's adapter: where in the vector its row of B begins, and its first column or -1."""
    base, first = feature * 0, feature * 0 - 1
    for entry in tl.static_range(entries):
        start, stop = tl.load(rows + 4 * entry), tl.load(rows + 4 * entry + 1)
        here = (feature >= start) & (feature < stop)
        first = tl.where(here, tl.load(rows + 4 * entry + 2), first)
        base = tl.where(here, tl.load(rows + 4 * entry + 3) + (feature - start) * rank, base)
    return base, first


@triton.jit  # type: ignore[untyped-decorator]
def _pull(  # type: ignore[no-untyped-def]
    dy, b, t, wide, partial_u, vectors, rows, tokens, width, per_chunk, size, scale,
    dy_stride, b_stride, t_stride, wide_stride,
    apart: tl.constexpr, entries: tl.constexpr, rank: tl.constexpr, frame: tl.constexpr,
    padded: tl.constexpr, rows_held: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """For a block of features and a chunk of tokens: the copy of dy, parts of u, and a part of dB."""
    feature = tl.program_id(0) * block + tl.arange(0, block)
    chunk = tl.program_id(1)
    inside = feature < width
    column = tl.arange(0, padded)
    factor = tl.load(
        b + feature.to(tl.int64)[:, None] * b_stride + column[None, :],
        mask=inside[:, None] & (column < frame)[None, :],
        other=0.0,
    )
    # Asked for before the loop, so that nothing waits for it at the end.
    base, first = _rows_of_b(feature, rows, entries, rank)
    d_b = tl.zeros((block, padded), tl.float32)
    for start in range(chunk * per_chunk, min(tokens, (chunk + 1) * per_chunk), rows_held):
        token = (start + tl.arange(0, rows_held)).to(tl.int64)
        live = token < tokens
        mask = live[:, None] & inside[None, :]
        d = tl.load(dy + token[:, None] * dy_stride + feature[None, :], mask=mask, other=0.0)
        if apart:
            tl.store(wide + token[:, None] * wide_stride + feature[None, :], d, mask=mask)
        thin = live[:, None] & (column < frame)[None, :]
        down = tl.load(t + token[:, None] * t_stride + column[None, :], mask=thin, other=0.0)
        d_b = tl.dot(tl.trans(d), down, d_b, input_precision="ieee")
        u = tl.dot(d, factor, input_precision="ieee")
        place = (tl.program_id(0) * tokens + token)[:, None] * frame + column[None, :]
        tl.store(partial_u + place, u, mask=thin)
    own = column[None, :] - first[:, None]
    mask = (inside & (first >= 0))[:, None] & (own >= 0) & (own < rank)
    tl.store(vectors + chunk.to(tl.int64) * size + base[:, None] + own, d_b * scale, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _push(  # type: ignore[no-untyped-def]
    x, u, vectors, bases, tokens, width, per_chunk, size, x_stride, u_stride,
    adapters: tl.constexpr, rank: tl.constexpr, frame: tl.constexpr, padded: tl.constexpr,
    rows_held: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """For a block of features and a chunk of tokens: a part of dA."""
    feature = tl.program_id(0) * block + tl.arange(0, block)
    chunk = tl.program_id(1)
    inside = feature < width
    column = tl.arange(0, padded)
    owner = column // rank
    base = tl.load(bases + owner, mask=owner < adapters, other=0) + (column - owner * rank) * width
    d_a = tl.zeros((block, padded), tl.float32)
    for start in range(chunk * per_chunk, min(tokens, (chunk + 1) * per_chunk), rows_held):
        token = (start + tl.arange(0, rows_held)).to(tl.int64)
        live = token < tokens
        mask = live[:, None] & inside[None, :]
        states = tl.load(x + token[:, None] * x_stride + feature[None, :], mask=mask, other=0.0)
        thin = live[:, None] & (column < frame)[None, :]
        up = tl.load(u + token[:, None] * u_stride + column[None, :], mask=thin, other=0.0)
        d_a = tl.dot(tl.trans(states), up, d_a, input_precision="ieee")
    # Into each adapter's A [rank, width].
    mask = inside[:, None] & (owner < adapters)[None, :]
    tl.store(vectors + chunk.to(tl.int64) * size + base[None, :] + feature[:, None], d_a, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(partial, out, blocks, size, columns, stride, held: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[i // columns, i % columns] = sum over the blocks of partial[block, i]."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < size
    sums = tl.zeros((held, block), tl.float32)
    for start in range(0, blocks, held):
        part = start + tl.arange(0, held)
        place = partial + part.to(tl.int64)[:, None] * size + index[None, :]
        sums += tl.load(place, mask=(part < blocks)[:, None] & inside[None, :], other=0.0)
    place = out + (index // columns).to(tl.int64) * stride + index % columns
    # Once, across threads, at the end: in the loop the loads would wait for it.
    tl.store(place, tl.sum(sums, 0).to(out.dtype.element_ty), mask=inside)


def _add_up(partial: torch.Tensor, out: torch.Tensor) -> None:
    """out [tokens, R] or [size], rows of any stride, from partial [blocks, as many]."""
    size, columns = out.numel(), out.shape[-1]
    held = min(_SUM.most, triton.next_power_of_2(len(partial)))
    block = max(_SUM.least, _SUM.elements // held)
    _sum[(triton.cdiv(size, block),)](
        partial, out, len(partial), size, columns, out.stride(0),
        held=held, block=block, num_warps=_SUM.warps,
    )  # fmt: skip


def _pull_by(frame: int, apart: bool, dtype: torch.dtype) -> Pull:
    tiles = TILES[columns_held(frame)]
    tile, programs = tiles.pull if apart else tiles.in_place
    return Pull(tile.of(dtype), programs)


def _chunks(width: int, by: Pull) -> int:
    """How many programs share the tokens of a block of features, however many tokens there are."""
    return max(1, min(_MOST_CHUNKS, by.programs // -(-width // by.tile.features)))


def _per_chunk(tokens: int, chunks: int, held: int) -> int:
    return -(-tokens // (chunks * held)) * held


def _pulled(
    dy: torch.Tensor,
    wide: torch.Tensor,
    b: torch.Tensor,
    t: torch.Tensor,
    rows: torch.Tensor,
    vectors: torch.Tensor,
    rank: int,
    scale: float,
) -> None:
    """Make wide = [dy, u], of which it may hold dy already; dB's parts go into `vectors`."""
    (tokens, width), frame, apart = dy.shape, b.shape[1], dy.data_ptr() != wide.data_ptr()
    tile, chunks = _pull_by(frame, apart, dy.dtype).tile, len(vectors)
    blocks = triton.cdiv(width, tile.features)
    partial = dy.new_empty(blocks, tokens, frame, dtype=torch.float32)
    _pull[(blocks, chunks)](
        dy, b, t, wide, partial, vectors, rows, tokens, width, _per_chunk(tokens, chunks, tile.tokens),
        vectors.shape[1], scale, dy.stride(0), b.stride(0), t.stride(0), wide.stride(0),
        apart=apart, entries=len(rows), rank=rank, frame=frame, padded=columns_held(frame),
        rows_held=tile.tokens, block=tile.features, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _add_up(partial.view(blocks, -1), wide[:, width:])


def _pushed(x: torch.Tensor, u: torch.Tensor, bases: torch.Tensor, vectors: torch.Tensor, rank: int) -> None:
    """dA's parts go into `vectors`."""
    (tokens, width), frame, chunks = x.shape, u.shape[1], len(vectors)
    tile = TILES[columns_held(frame)].push.of(x.dtype)
    _push[(triton.cdiv(width, tile.features), chunks)](
        x, u, vectors, bases, tokens, width, _per_chunk(tokens, chunks, tile.tokens), vectors.shape[1],
        x.stride(0), u.stride(0), adapters=len(bases), rank=rank, frame=frame, padded=columns_held(frame),
        rows_held=tile.tokens, block=tile.features, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _vectors(like: torch.Tensor, out: int, frame: int, apart: bool, size: int) -> torch.Tensor:
    """Room for each chunk's part of a linear's factor gradients. Every element gets written."""
    return like.new_empty(_chunks(out, _pull_by(frame, apart, like.dtype)), size, dtype=torch.float32)


def _added_up(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = vectors.new_empty(vectors.shape[1], dtype=dtype)
    _add_up(vectors, out)
    return out


@torch.library.custom_op("lora_suite::thin_pull", mutates_args=())
def thin_pull(
    dy: torch.Tensor,
    t: torch.Tensor,
    matrix: torch.Tensor,
    rows: torch.Tensor,
    rank: int,
    scale: float,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[dy, u] [tokens, out + R] of a framed linear, and parts of its dB [chunks, size] for `thin_push`.

    dy [tokens, out]; t [tokens, R] of the forward pass; matrix: the frame; rows, size: where gradients go,
    see the module.
    """
    dy = dy.contiguous()
    out = dy.shape[1]
    vectors = _vectors(dy, out, t.shape[1], True, size)
    beside = dy.new_empty(len(dy), len(matrix))
    _pulled(dy, beside, matrix[:out, matrix.shape[1] - t.shape[1] :], t, rows, vectors, rank, scale)
    return beside, vectors


@thin_pull.register_fake
def _(
    dy: torch.Tensor,
    t: torch.Tensor,
    matrix: torch.Tensor,
    rows: torch.Tensor,
    rank: int,
    scale: float,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return dy.new_empty(len(dy), len(matrix)), _vectors(dy, dy.shape[1], t.shape[1], True, size)


@torch.library.custom_op("lora_suite::thin_push", mutates_args=("vectors",))
def thin_push(
    x: torch.Tensor, u: torch.Tensor, vectors: torch.Tensor, bases: torch.Tensor, rank: int
) -> torch.Tensor:
    """The factors' gradients [size] of a framed linear, in the dtype of x.

    x [tokens, in]; u [tokens, R]; vectors: with dB in it, where dA's parts go, too; bases: where in it.
    """
    _pushed(x, u, bases, vectors, rank)
    return _added_up(vectors, x.dtype)


@thin_push.register_fake
def _(
    x: torch.Tensor, u: torch.Tensor, vectors: torch.Tensor, bases: torch.Tensor, rank: int
) -> torch.Tensor:
    return x.new_empty(vectors.shape[1])


@torch.library.custom_op("lora_suite::thin_mlp_backward", mutates_args=())
def thin_mlp_backward(
    dy: torch.Tensor,
    t: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor | None,
    t_down: torch.Tensor,
    matrices: list[torch.Tensor],
    rows: list[torch.Tensor],
    bases: torch.Tensor,
    ranks: list[int],
    scales: list[float],
    sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the first framed linear of a gated MLP what `thin_pull` gives; the factors' gradients of the second.

    dy [tokens, in]; t [tokens, R] of the first linear, gate_up its output; act, made anew where it was not
    kept, and t_down of the second, and `bases` of it. Lists: of the first and of the second.
    """
    dy = dy.contiguous()
    (tokens, out), twice = dy.shape, gate_up.shape[1]
    width = twice // 2
    ours = _vectors(dy, twice, t.shape[1], False, sizes[0])
    others = _vectors(dy, out, t_down.shape[1], True, sizes[1])

    above = dy.new_empty(tokens, out + t_down.shape[1])
    _pulled(dy, above, matrices[1][:out, width:], t_down, rows[1], others, ranks[1], scales[1])
    d_act = above @ matrices[1][:, :width]
    # Each element's gradient is read before the activation takes its place.
    d = gated_gradient(gate_up, d_act, t.shape[1], d_act if act is None else None)
    _pushed(d_act if act is None else act, above[:, out:], bases, others, ranks[1])

    factor = matrices[0][:twice, matrices[0].shape[1] - t.shape[1] :]
    _pulled(d[:, :twice], d, factor, t, rows[0], ours, ranks[0], scales[0])
    return d, ours, _added_up(others, dy.dtype)


@thin_mlp_backward.register_fake
def _(
    dy: torch.Tensor,
    t: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor | None,
    t_down: torch.Tensor,
    matrices: list[torch.Tensor],
    rows: list[torch.Tensor],
    bases: torch.Tensor,
    ranks: list[int],
    scales: list[float],
    sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        dy.new_empty(len(dy), gate_up.shape[1] + t.shape[1]),
        _vectors(dy, gate_up.shape[1], t.shape[1], False, sizes[0]),
        dy.new_empty(sizes[1]),
    )
