# SPDX-License-Identifier: Apache-2.0
"""Build megatron-core's GPTModel for a Llama-like decoder, without TransformerEngine or apex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn import functional

from lora_suite.config.schema import Megatron
from lora_suite.train.backends.megatron.architecture import Architecture
from lora_suite.train.backends.megatron.compat import mlp_submodules
from lora_suite.train.backends.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from lora_suite.train.backends.megatron.modules import RMSNorm, Router, SdpaAttention


def transformer_config(
    architecture: Architecture, parallel: Megatron, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """megatron-core's configuration of a recipe.

    Its fusions stay off: they need TransformerEngine or apex. `calculate_per_token_loss` keeps the schedule
    from dividing the loss by the number of micro batches, and its DDP from averaging over ranks: our loss is
    already divided by the global batch's tokens, so both must sum.
    """
    shape = architecture.shape
    recompute: dict[str, Any] = {}
    if parallel.activation_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Stages tell each other the shape of every micro batch. The dispatcher is of no use in a dense model,
        # but megatron-core refuses its default one together with variable lengths.
        variable_seq_lengths=parallel.pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=device.type == "cpu",
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        **recompute,
        **_experts(architecture),
    )


def _experts(architecture: Architecture) -> dict[str, Any]:
    """megatron-core's words for routed experts; none for a model without.

    The softmax over the chosen experts alone is the softmax over all, divided by the sum of the chosen ones.
    No loss but the tokens' is trained: transformers adds none either unless it is asked for router logits.
    """
    moe = architecture.shape.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.experts,
        "moe_router_topk": moe.active,
        "moe_ffn_hidden_size": moe.intermediate,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not architecture.routes_sum_to_one,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """No initialisation: every weight is loaded afterwards. (Switching it off altogether would also leave out
    the tensor parallel marks, by which gradient norms count a replica once.)"""
    return weight


@dataclass(frozen=True)
class LayerModules:
    """What a layer's spec gets beside our norm; None leaves megatron-core's own linears.

    Routed experts keep their linears. head_norm: of queries' and keys' heads, in models that have one.
    """

    column: type | None = None
    row: type | None = None
    head_norm: type = RMSNorm


PLAIN = LayerModules()
ADAPTED = LayerModules(LoraColumnParallelLinear, LoraRowParallelLinear)


def build_model(config: TransformerConfig, architecture: Architecture, modules: LayerModules) -> GPTModel:
    """This stage of the model, with weights still to be loaded."""
    layers = get_num_layers_to_build(config)
    layer_spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    _replace_modules(layer_spec.submodules, config, modules)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec] * layers, layer_norm=RMSNorm
        ),
        vocab_size=architecture.shape.vocab,
        max_sequence_length=architecture.shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.shape.tied_head,
        position_embedding_type="rope",
        rotary_base=architecture.rope_base,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 1.0,
    )


def _replace_modules(layer: Any, config: TransformerConfig, modules: LayerModules) -> None:
    """Put our norm, attention and perhaps linears into a layer's spec."""
    attention = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = SdpaAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = modules.head_norm
    if modules.column is not None:
        attention.linear_qkv, attention.linear_proj = modules.column, modules.row
    mlp = mlp_submodules(layer)
    if config.num_moe_experts is not None:
        mlp.router = Router
    elif modules.column is not None:
        mlp.linear_fc1, mlp.linear_fc2 = modules.column, modules.row
