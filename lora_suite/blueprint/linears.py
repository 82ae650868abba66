# SPDX-License-Identifier: Apache-2.0
"""Every matrix of a model that multiplies activations, under its transformers name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lora_suite.blueprint.shape import HybridShape, ModelShape

Kind = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "mamba_in", "mamba_out", "router", "experts", "shared", "head"
]


@dataclass(frozen=True)
class Linear:
    """One matrix [out, in], or a stack of `count` of them (routed experts) of which a token meets `active`.

    name: full name as in the transformers model. layer: None for the head.
    """

    name: str
    in_features: int
    out_features: int
    layer: int | None
    kind: Kind
    bias: bool = False
    count: int = 1
    active: int = 1

    @property
    def params(self) -> int:
        """Parameters, bias included."""
        return self.count * (self.in_features * self.out_features + (self.out_features if self.bias else 0))

    @property
    def active_params(self) -> int:
        """Matrix elements that one token is multiplied with."""
        return self.active * self.in_features * self.out_features


def model_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return all linears of a model, layer by layer, the head last (also where it is the embedding)."""
    layers: list[Linear] = []
    for index in range(shape.layers):
        if shape.hybrid is None:
            layers += _attention(shape, index, f"model.layers.{index}.self_attn")
            mlp = _gated_mlp if shape.moe is None else _experts
            layers += mlp(shape, index, f"model.layers.{index}.mlp")
        else:
            layers += _mixer(shape, shape.hybrid, index, f"model.layers.{index}.mixer")
    return (*layers, Linear("lm_head", shape.hidden, shape.vocab, None, "head"))


def total_params(shape: ModelShape) -> int:
    """Return all parameters of a model: linears, embedding, norms, and what a Mamba mixer has besides.

    A head that is the embedding counts once.
    """
    linears = sum(
        linear.params for linear in model_linears(shape) if linear.kind != "head" or not shape.tied_head
    )
    embedding = shape.vocab * shape.hidden
    norms = shape.hidden * (1 + shape.layers * (1 if shape.hybrid else 2))
    head_norms = 2 * shape.head_dim * shape.attention_layers if shape.qk_norm else 0
    mamba = 0
    if shape.hybrid is not None:
        hybrid = shape.hybrid
        mamba = hybrid.pattern.count("mamba") * _mamba_extras(hybrid)
    return linears + embedding + norms + head_norms + mamba


def _attention(shape: ModelShape, layer: int, prefix: str) -> Iterator[Linear]:
    """Queries, keys, values and the output of one attention."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Linear(f"{prefix}.q_proj", shape.hidden, queries, layer, "q", shape.qkv_bias)
    yield Linear(f"{prefix}.k_proj", shape.hidden, keys, layer, "k", shape.qkv_bias)
    yield Linear(f"{prefix}.v_proj", shape.hidden, keys, layer, "v", shape.qkv_bias)
    yield Linear(f"{prefix}.o_proj", queries, shape.hidden, layer, "o", shape.o_bias)


def _gated_mlp(shape: ModelShape, layer: int, prefix: str) -> Iterator[Linear]:
    """Gate, up and down of one gated MLP."""
    yield Linear(f"{prefix}.gate_proj", shape.hidden, shape.intermediate, layer, "gate", shape.mlp_bias)
    yield Linear(f"{prefix}.up_proj", shape.hidden, shape.intermediate, layer, "up", shape.mlp_bias)
    yield Linear(f"{prefix}.down_proj", shape.intermediate, shape.hidden, layer, "down", shape.mlp_bias)


def _experts(shape: ModelShape, layer: int, prefix: str) -> Iterator[Linear]:
    """The router and the stacks of gated experts that stand in place of one MLP."""
    assert shape.moe is not None
    moe, hidden = shape.moe, shape.hidden
    stack = (False, moe.experts, moe.active)
    yield Linear(f"{prefix}.gate", hidden, moe.experts, layer, "router")
    yield Linear(f"{prefix}.experts.gate_up_proj", hidden, 2 * moe.intermediate, layer, "experts", *stack)
    yield Linear(f"{prefix}.experts.down_proj", moe.intermediate, hidden, layer, "experts", *stack)


def _mixer(shape: ModelShape, hybrid: HybridShape, layer: int, prefix: str) -> Iterator[Linear]:
    """The one mixer of a hybrid layer."""
    mixer, hidden, bias = hybrid.pattern[layer], shape.hidden, shape.mlp_bias
    if mixer == "attention":
        yield from _attention(shape, layer, prefix)
    elif mixer == "mlp":
        yield Linear(f"{prefix}.up_proj", hidden, shape.intermediate, layer, "up", bias)
        yield Linear(f"{prefix}.down_proj", shape.intermediate, hidden, layer, "down", bias)
    elif mixer == "mamba":
        inner = hybrid.mamba_heads * hybrid.mamba_head_dim
        projected = inner + conv_channels(hybrid) + hybrid.mamba_heads
        yield Linear(f"{prefix}.in_proj", hidden, projected, layer, "mamba_in", hybrid.mamba_bias)
        yield Linear(f"{prefix}.out_proj", inner, hidden, layer, "mamba_out", hybrid.mamba_bias)
    else:
        stack = (False, hybrid.experts, hybrid.experts_per_token)
        width, shared = hybrid.expert_intermediate, hybrid.shared_intermediate
        yield Linear(f"{prefix}.gate", hidden, hybrid.experts, layer, "router")
        yield Linear(f"{prefix}.experts.up_proj", hidden, width, layer, "experts", *stack)
        yield Linear(f"{prefix}.experts.down_proj", width, hidden, layer, "experts", *stack)
        yield Linear(f"{prefix}.shared_experts.up_proj", hidden, shared, layer, "shared", bias)
        yield Linear(f"{prefix}.shared_experts.down_proj", shared, hidden, layer, "shared", bias)


def conv_channels(hybrid: HybridShape) -> int:
    """Channels that pass the convolution of a Mamba mixer: the inner ones, and B and C of each group."""
    return hybrid.mamba_heads * hybrid.mamba_head_dim + 2 * hybrid.mamba_groups * hybrid.state_size


def _mamba_extras(hybrid: HybridShape) -> int:
    """Parameters of a Mamba mixer beside its two linears: convolution, gated norm, and dt, A, D a head."""
    channels = conv_channels(hybrid)
    convolution = channels * hybrid.conv_kernel + (channels if hybrid.conv_bias else 0)
    return convolution + hybrid.mamba_heads * hybrid.mamba_head_dim + 3 * hybrid.mamba_heads
