# SPDX-License-Identifier: Apache-2.0
"""Causal attention for transformers models, without a mask and without a wait for the device.

transformers' own sdpa path looks in every forward pass whether rows are packed, on the host. Rows here are
padded on the right and never packed, so plain causal attention is right, and an implementation for which
transformers knows no mask function is given none and looked into for none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

NAME = "lora_suite_causal"


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to this position and those before it.

    query [rows, heads, length, channels]; key and value [rows, kv heads, length, channels], each shared by
    heads / kv heads queries. Returns [rows, length, heads, channels]. Raises ValueError for a mask or a
    sliding window, which would silently not be there.
    """
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise ValueError("attention here is causal over the whole row: no mask, no sliding window")
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
