# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the rotary embedding of a stack of queries, keys and values, and of its gradient.

Every element is read and written once, the values' among them: their gradient has to come back beside those
of queries and keys. Loaded where Triton and a GPU are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_suite.train.fast.kernels import adjacent

_HEADS = 16
"""Heads that a program has of a token."""


@triton.jit  # type: ignore[untyped-decorator]
def _angles(  # type: ignore[no-untyped-def]
    cos, sin, slot, cos_stride, sin_stride, rotating, half: tl.constexpr
):
    """Cosines and sines of both halves of the channels [heads, half]; 1 and 0 of heads that stay."""
    channel = tl.arange(0, half)
    c = cos + slot * cos_stride + channel
    s = sin + slot * sin_stride + channel
    which = rotating[:, None]
    return (
        tl.where(which, tl.load(c).to(tl.float32)[None, :], 1.0),
        tl.where(which, tl.load(c + half).to(tl.float32)[None, :], 1.0),
        tl.where(which, tl.load(s).to(tl.float32)[None, :], 0.0),
        tl.where(which, tl.load(s + half).to(tl.float32)[None, :], 0.0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _place(head, heads, kv_heads, grouped: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a head, counted through queries, keys and values, stands among a token's states."""
    if not grouped:
        return head
    per = heads // kv_heads
    of_query = head // per * (per + 2) + head % per
    of_key = (head - heads) * (per + 2) + per
    of_value = (head - heads - kv_heads) * (per + 2) + per + 1
    return tl.where(head < heads, of_query, tl.where(head < heads + kv_heads, of_key, of_value))


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    states, cos, sin, query, key, value, length, heads, kv_heads, row_stride, slot_stride,
    cos_stride, sin_stride, grouped: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, slot = token // length, token % length
    head = tl.program_id(1) * block + tl.arange(0, block)
    of_query, of_key = head < heads, (head >= heads) & (head < heads + kv_heads)
    of_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    inside = (head < heads + 2 * kv_heads)[:, None]
    channel = tl.arange(0, half)[None, :]
    source = _place(head, heads, kv_heads, grouped)[:, None] * (2 * half)
    place = states + row * row_stride + slot * slot_stride + source + channel
    left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    cos_l, cos_r, sin_l, sin_r = _angles(cos, sin, slot, cos_stride, sin_stride, of_query | of_key, half)
    out_l = (left * cos_l - right * sin_l).to(query.dtype.element_ty)
    out_r = (right * cos_r + left * sin_r).to(query.dtype.element_ty)
    at = query + (token * heads + head)[:, None] * (2 * half) + channel
    tl.store(at, out_l, mask=of_query[:, None])
    tl.store(at + half, out_r, mask=of_query[:, None])
    at = key + (token * kv_heads + head - heads)[:, None] * (2 * half) + channel
    tl.store(at, out_l, mask=of_key[:, None])
    tl.store(at + half, out_r, mask=of_key[:, None])
    at = value + (token * kv_heads + head - heads - kv_heads)[:, None] * (2 * half) + channel
    tl.store(at, out_l, mask=of_value[:, None])
    tl.store(at + half, out_r, mask=of_value[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_backward(  # type: ignore[no-untyped-def]
    d_query, d_key, d_value, cos, sin, out, length, heads, kv_heads,
    query_row, query_slot, query_head, key_row, key_slot, key_head, value_row, value_slot, value_head,
    cos_stride, sin_stride, grouped: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, slot = token // length, token % length
    head = tl.program_id(1) * block + tl.arange(0, block).to(tl.int64)
    total = heads + 2 * kv_heads
    of_query, of_key = head < heads, (head >= heads) & (head < heads + kv_heads)
    of_value = (head >= heads + kv_heads) & (head < total)
    channel = tl.arange(0, half)[None, :]
    # Each head is in one of the three; elsewhere nothing is read.
    at = d_query + row * query_row + slot * query_slot + head[:, None] * query_head + channel
    left = tl.load(at, mask=of_query[:, None], other=0.0).to(tl.float32)
    right = tl.load(at + half, mask=of_query[:, None], other=0.0).to(tl.float32)
    at = d_key + row * key_row + slot * key_slot + (head - heads)[:, None] * key_head + channel
    left += tl.load(at, mask=of_key[:, None], other=0.0).to(tl.float32)
    right += tl.load(at + half, mask=of_key[:, None], other=0.0).to(tl.float32)
    place = (head - heads - kv_heads)[:, None] * value_head + channel
    at = d_value + row * value_row + slot * value_slot + place
    left += tl.load(at, mask=of_value[:, None], other=0.0).to(tl.float32)
    right += tl.load(at + half, mask=of_value[:, None], other=0.0).to(tl.float32)
    cos_l, cos_r, sin_l, sin_r = _angles(cos, sin, slot, cos_stride, sin_stride, of_query | of_key, half)
    place = out + (token * total + _place(head, heads, kv_heads, grouped))[:, None] * (2 * half) + channel
    inside = (head < total)[:, None]
    tl.store(place, (left * cos_l + right * sin_r).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (right * cos_r - left * sin_l).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("lora_suite::rotate", mutates_args=())
def rotate(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, grouped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries [rows, length, heads, head_dim]; rotated keys, and values, of kv_heads.

    states [rows, length, heads + 2 · kv_heads, head_dim], each token's heads adjacent; cos, sin [length,
    head_dim]. head_dim is a power of two. grouped: the states have a key's queries, it and its value, then
    those of the next key, instead of all queries, all keys, all values.
    """
    rows, length, total, channels = states.shape
    if states.stride()[2:] != (channels, 1):
        states = states.contiguous()
    query = states.new_empty(rows, length, heads, channels)
    key, value = (states.new_empty(rows, length, kv_heads, channels) for _ in range(2))
    cos, sin = adjacent(cos), adjacent(sin)
    _rotate[(rows * length, triton.cdiv(total, _HEADS))](
        states, cos, sin, query, key, value, length, heads, kv_heads, states.stride(0), states.stride(1),
        cos.stride(0), sin.stride(0), grouped=grouped, half=channels // 2, block=_HEADS, num_warps=4,
    )  # fmt: skip
    return query, key, value


@rotate.register_fake
def _(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, grouped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, length, _, channels = states.shape
    key, value = (states.new_empty(rows, length, kv_heads, channels) for _ in range(2))
    return states.new_empty(rows, length, heads, channels), key, value


@torch.library.custom_op("lora_suite::rotate_backward", mutates_args=())
def rotate_backward(
    d_query: torch.Tensor,
    d_key: torch.Tensor,
    d_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    grouped: bool,
) -> torch.Tensor:
    """The gradient by `rotate`'s states from those by its queries, keys and values."""
    d_query, d_key, d_value, cos, sin = map(adjacent, (d_query, d_key, d_value, cos, sin))
    rows, length, heads, channels = d_query.shape
    kv_heads = d_key.shape[2]
    total = heads + 2 * kv_heads
    out = d_query.new_empty(rows, length, total, channels)
    _rotate_backward[(rows * length, triton.cdiv(total, _HEADS))](
        d_query, d_key, d_value, cos, sin, out, length, heads, kv_heads,
        *d_query.stride()[:3], *d_key.stride()[:3], *d_value.stride()[:3], cos.stride(0), sin.stride(0),
        grouped=grouped, half=channels // 2, block=_HEADS, num_warps=4,
    )  # fmt: skip
    return out


@rotate_backward.register_fake
def _(
    d_query: torch.Tensor,
    d_key: torch.Tensor,
    d_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    grouped: bool,
) -> torch.Tensor:
    rows, length, heads, channels = d_query.shape
    return d_query.new_empty(rows, length, heads + 2 * d_key.shape[2], channels)
