# SPDX-License-Identifier: Apache-2.0
"""The shape of a model, read from its transformers configuration without transformers or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_suite.config.errors import ConfigError
from lora_suite.config.models import read_config
from lora_suite.config.nearest import nearest

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "nemotron_h"]
Mixer = Literal["mamba", "attention", "mlp", "moe"]
_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe", "nemotron_h")
_PATTERN: dict[str, Mixer] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_QWEN3_HEAD_DIM = 128  # transformers' default for that family, whatever the hidden size


@dataclass(frozen=True)
class HybridShape:
    """What a hybrid model has besides attention: Mamba mixers and routed experts, one mixer a layer.

    pattern: the mixer of each layer. Sizes count channels; `mamba_groups` share B and C of the state space.
    `experts` of width `expert_intermediate`, of which a token meets `experts_per_token`, and the shared
    expert of width `shared_intermediate`, which every token meets.
    """

    pattern: tuple[Mixer, ...]
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool
    mamba_bias: bool
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int


@dataclass(frozen=True)
class MoeShape:
    """In place of every MLP: `experts` of width `intermediate`, of which a token meets `active`."""

    experts: int
    active: int
    intermediate: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: all counts of channels, heads, layers or ids.

    tied_head: the head is the embedding. qkv_bias, o_bias, mlp_bias: which linears have a bias. qk_norm:
    queries and keys are normalised a head. hybrid: None for a plain transformer. moe: experts in place of the
    MLPs of a plain transformer, where it has any; `intermediate` then is of no layer.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_head: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    max_positions: int
    hybrid: HybridShape | None = None
    moe: MoeShape | None = None

    @property
    def attention_layers(self) -> int:
        """Layers that have attention."""
        return self.hybrid.pattern.count("attention") if self.hybrid else self.layers


def read_shape(path: Path) -> ModelShape:
    """Read a model's shape from its JSON. Raises ConfigError naming file and key, or an unknown type."""
    config = read_config(path)
    family = next((known for known in _FAMILIES if known == config.get("model_type")), None)
    if family is None:
        near = nearest(str(config.get("model_type")), _FAMILIES)
        raise ConfigError(
            f"{path}: model_type {config.get('model_type')!r} is not known; known are {', '.join(_FAMILIES)}"
            + (f" (the nearest is {near[0]})" if near else "")
        )
    reader = _Reader(path, config)
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    head_dim = reader.count("head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else max(1, hidden // heads))
    attention_bias = reader.flag("attention_bias")
    return ModelShape(
        family=family,
        layers=reader.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", heads if family == "llama" else None),
        head_dim=head_dim,
        intermediate=reader.count("intermediate_size"),
        vocab=reader.count("vocab_size"),
        tied_head=reader.flag("tie_word_embeddings"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=reader.flag("mlp_bias") and family in ("llama", "nemotron_h"),
        max_positions=reader.count("max_position_embeddings"),
        hybrid=_hybrid(reader) if family == "nemotron_h" else None,
        moe=_moe(reader) if family == "qwen3_moe" else None,
    )


def _moe(reader: _Reader) -> MoeShape:
    """Read the experts of a model that has them in every layer; raises ConfigError for any other."""
    if reader.config.get("decoder_sparse_step", 1) != 1 or reader.config.get("mlp_only_layers"):
        raise ConfigError(
            f"{reader.path}: decoder_sparse_step and mlp_only_layers leave plain MLPs in some layers; only "
            f"models with experts in every layer are known"
        )
    # transformers writes the count under another name than the hub's files have.
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    return MoeShape(
        experts=reader.count(key),
        active=reader.count("num_experts_per_tok"),
        intermediate=reader.count("moe_intermediate_size"),
    )


def _hybrid(reader: _Reader) -> HybridShape:
    """Read the hybrid part; its layer pattern must be as long as the model is deep."""
    pattern = str(reader.required("hybrid_override_pattern"))
    layers = reader.count("num_hidden_layers")
    if len(pattern) != layers or set(pattern) - set(_PATTERN):
        raise ConfigError(
            f"{reader.path}: hybrid_override_pattern must have {layers} letters (num_hidden_layers) out of "
            f"{' '.join(_PATTERN)}, but is {pattern!r}"
        )
    return HybridShape(
        pattern=tuple(_PATTERN[letter] for letter in pattern),
        mamba_heads=reader.count("mamba_num_heads"),
        mamba_head_dim=reader.count("mamba_head_dim"),
        mamba_groups=reader.count("n_groups"),
        state_size=reader.count("ssm_state_size"),
        conv_kernel=reader.count("conv_kernel"),
        conv_bias=reader.flag("use_conv_bias"),
        mamba_bias=reader.flag("use_bias"),
        experts=reader.count("n_routed_experts"),
        experts_per_token=reader.count("num_experts_per_tok"),
        expert_intermediate=reader.count("moe_intermediate_size"),
        shared_intermediate=reader.count("moe_shared_expert_intermediate_size"),
    )


@dataclass(frozen=True)
class _Reader:
    """Typed access to a configuration; every refusal names the file and the key."""

    path: Path
    config: Mapping[str, Any]

    def required(self, key: str) -> Any:
        """Return a value that must be there."""
        if self.config.get(key) is None:
            raise ConfigError(f"{self.path}: {key} is missing")
        return self.config[key]

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self.required(key) if default is None else self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {key} must be a whole number from 1 on, not {value!r}")
        return value

    def flag(self, key: str) -> bool:
        """Return true or false; a missing flag is false."""
        value = self.config.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: {key} must be true or false, not {value!r}")
        return value
