# SPDX-License-Identifier: Apache-2.0
"""Causal attention for both backends, without a mask and without a wait for the device.

transformers' own sdpa path looks in every forward pass whether rows are packed, on the host. Here the batch
says so: rows are padded on the right, where plain causal attention is right, or packed with `Segments`. An
implementation for which transformers knows no mask function is given none and looked into for none.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from lora_suite.train.batch import Segments

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "lora_suite_causal"

_HALF = (torch.bfloat16, torch.float16)


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
    segments: Segments | None = None,
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float | None
) -> torch.Tensor:
    """Causal attention inside each segment: block-diagonal, and nothing of the blocks' outside is computed.

    query [slots, heads, channels]; key and value [slots, kv heads, channels]. Returns [slots, heads,
    channels]. On a GPU in half precision one kernel does all segments; elsewhere it is one plain causal
    attention a segment, the same arithmetic as of unpacked rows.
    """
    if query.is_cuda and query.dtype in _HALF:
        kernel = _varlen_kernel()
        if kernel is not None:
            return kernel(query, key, value, segments, scale)
    lengths = list(segments.lengths)
    parts = zip(*(torch.split(states, lengths) for states in (query, key, value)), strict=True)
    return torch.cat([_causal(q, k, v, scale) for q, k, v in parts])


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of one segment, [length, heads, channels] each."""
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.squeeze(0).transpose(0, 1)


@cache
def _varlen_kernel() -> Callable[..., torch.Tensor] | None:
    """torch's variable length attention; None before torch 2.11, whose public function has no scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known or "window_size" not in known:
        return None
    grouped = "enable_gqa" in known

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float | None
    ) -> torch.Tensor:
        shared = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {}
        if grouped:
            options["enable_gqa"] = shared > 1
        elif shared > 1:
            key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
        output = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            segments.boundaries,
            segments.boundaries,
            segments.longest,
            segments.longest,
            scale=scale,
            window_size=(-1, 0),
            **options,
        )
        assert isinstance(output, torch.Tensor)
        return output

    return attend
