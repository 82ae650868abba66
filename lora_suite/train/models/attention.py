# SPDX-License-Identifier: Apache-2.0
"""Causal attention for both backends, without a mask and without a wait for the device.

transformers' own sdpa path looks in every forward pass whether rows are packed, on the host. Here the batch
says so: rows are padded on the right, where plain causal attention is right, or packed with `Segments`. An
implementation for which transformers knows no mask function is given none and looked into for none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lora_suite.train.batch import Segments

NAME = "lora_suite_causal"

_HALF = (torch.bfloat16, torch.float16)


class Blocks(NamedTuple):
    """Where packed rows begin and end, as a captured graph can have it: tensors of one size for every pack.

    positions: int64 [1, slots], of each slot in its row. boundaries: int32 [rows + 1], as of `Segments`; rows
    of no length fill up to a fixed number. span: of a size that no row is longer than; nothing else of it is
    read. mask: bool [slots, slots], who attends to whom; None where the kernel needs none.

    One compiled layer serves all numbers of rows and all spans: these are sizes of tensors, which it need not
    know, where a number would be compiled in.
    """

    positions: torch.Tensor
    boundaries: torch.Tensor
    span: torch.Tensor
    mask: torch.Tensor | None

    @property
    def longest(self) -> int:
        """No row is longer."""
        return self.span.shape[0]

    @classmethod
    def of(
        cls, positions: torch.Tensor, boundaries: torch.Tensor, longest: int, dtype: torch.dtype
    ) -> Blocks:
        """Of rows attended to in `dtype`, none longer than `longest`; without a wait for the device."""
        span = boundaries.new_empty(longest)
        if _in_kernel(boundaries.device, dtype):
            for tensor in (boundaries, span):
                torch._dynamo.mark_dynamic(tensor, 0)
            return cls(positions, boundaries, span, None)
        slot = torch.arange(positions.numel(), dtype=boundaries.dtype, device=boundaries.device)
        row = torch.searchsorted(boundaries, slot, right=True)
        return cls(positions, boundaries, span, (row[:, None] == row) & (slot[:, None] >= slot))


def register() -> str:
    """Make the attention known to transformers; return its name, an ``attn_implementation``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, causal_attention)
    return NAME


def causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | Blocks | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to this position and those before it, of its segment where there are `segments`.

    query [rows, heads, length, channels]; key and value [rows, kv heads, length, channels], each shared by
    heads / kv heads queries. Returns [rows, length, heads, channels]. Raises ValueError for a mask or a
    sliding window, which would silently not be there, and for dropout of packed rows.
    """
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise ValueError("attention here is causal over the whole row: no mask, no sliding window")
    if segments is not None:
        if dropout:
            raise ValueError("attention of packed rows has no dropout")
        query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        return packed_attention(query, key, value, segments, scaling).unsqueeze(0), None
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments | Blocks,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention inside each segment: block-diagonal.

    query [slots, heads, channels]; key and value [slots, kv heads, channels]. Returns [slots, heads,
    channels]. On a GPU in half precision one kernel does all segments, and nothing between two of them is
    computed. Elsewhere it is one plain causal attention a segment, the same arithmetic as of unpacked rows,
    or, where tensors must have one size for every pack, one attention with the blocks' mask.
    """
    if VARLEN is not None and _in_kernel(query.device, query.dtype):
        return VARLEN(query, key, value, segments.boundaries, segments.longest, scale)
    if isinstance(segments, Blocks):
        return _attend(query, key, value, scale, segments.mask)
    lengths = list(segments.lengths)
    parts = zip(*(torch.split(states, lengths) for states in (query, key, value)), strict=True)
    return torch.cat([_attend(q, k, v, scale, None) for q, k, v in parts])


def attend_in_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks | None
) -> torch.Tensor:
    """Causal attention of each row, or of the segments of a packed one, scaled by the root of the channels.

    query [rows, length, heads, channels]; key and value with kv heads, which divide heads. blocks: of the
    only row, where it is packed. Returns [rows, length, heads, channels]; without rows where it is packed.
    """
    if blocks is not None:
        return packed_attention(query[0], key[0], value[0], blocks, None)
    return functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [length, heads, channels] each, by the mask, causal without one."""
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.squeeze(0).transpose(0, 1)


Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None], torch.Tensor]
"""From query, key, value, boundaries, length of the longest segment and scale."""


def _varlen_kernel() -> Varlen | None:
    """torch's variable length attention; None before torch 2.11, whose public function has no scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known or "window_size" not in known:
        return None
    # Where there is no such argument, the kernel shares heads unasked.
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        longest: int,
        scale: float | None,
    ) -> torch.Tensor:
        output = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            boundaries,
            boundaries,
            longest,
            longest,
            scale=scale,
            window_size=(-1, 0),
            **options,
        )
        assert isinstance(output, torch.Tensor)
        return output

    return attend


VARLEN = _varlen_kernel()
"""The kernel, found once: a compiled layer cannot look for it."""


def _in_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel does what is packed."""
    return VARLEN is not None and device.type == "cuda" and dtype in _HALF
