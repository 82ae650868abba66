# SPDX-License-Identifier: Apache-2.0
"""The modules that replace megatron-core's own through its ModuleSpec, in every arm alike.

Its local norm refuses sequence parallelism, and its local attention is unfused: it stores the whole
[length, length] score matrix, which no fair speed comparison could use. Its router of experts cannot multiply
without TransformerEngine (release 0.16.1).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn
from torch.nn import functional

from lora_suite.train.batch import Segments
from lora_suite.train.models.attention import packed_attention


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm with megatron-core's constructor; `eps` is never left to torch.

    Under sequence parallelism each rank normalises its slice of the sequence, so the weight's gradient is
    partial; the mark `sequence_parallel` is what makes megatron-core's `finalize_model_grads` sum it over
    tensor parallel ranks.
    """

    eps: float

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Packed rows in megatron-core's words, and `segments` in ours for `SdpaAttention`.

    Boundaries are on the host: megatron-core's rotary embedding, which restarts at each, reads them there;
    from the device it would have to wait for them in every layer.
    """

    def __init__(self, segments: Segments) -> None:
        boundaries = Segments.of(segments.lengths).boundaries
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=segments.longest,
            max_seqlen_kv=segments.longest,
        )
        self.segments = segments


class Router(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, whose logits are a plain product in the model's dtype, as in transformers."""

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        if not config.use_cpu_initialization:
            # megatron-core makes it on the CPU, and moves it in the product that is not used here.
            self.weight.data = self.weight.data.to(torch.cuda.current_device())

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [length, rows, experts] of hidden states [length, rows, hidden]."""
        return functional.linear(input, self.weight)


class SdpaAttention(nn.Module):
    """Causal attention by torch's scaled_dot_product_attention, with grouped keys and values as they are.

    Rows are padded on the right, so the causal mask is the only one needed: no supervised position can see
    a padded one. Packed rows bring their segments. Without parameters, hence without tensor
    parallel code: it sees this rank's heads.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **_placement: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.grouped = config.num_query_groups != config.num_attention_heads

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: PackedRows | None = None,
        **_options: Any,
    ) -> torch.Tensor:
        """query [length, rows, heads, head_dim], key and value with fewer heads; [length, rows, features].

        Packed rows come as `PackedRows`, then without a dimension of rows: [slots, heads, head_dim] to
        [slots, features].
        """
        if packed_seq_params is not None:
            return packed_attention(
                query, key, value, packed_seq_params.segments, self.softmax_scale
            ).flatten(1)
        # [s, b, heads, d] -> [b, heads, s, d]
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=self.grouped
        )
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()
