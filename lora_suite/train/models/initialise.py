# SPDX-License-Identifier: Apache-2.0
"""The first weights of a model, in Hugging Face's names and shapes.

A tensor's values depend on (seed, its name) and the kind of device alone: not on the backend, the parallel
layout, the precision, the order of creation, or a library's own initialisation. So two backends that map the
same names start from the same model, and a rank that holds a shard draws the whole tensor and keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Weight:
    """One tensor of a model: its name and whole shape in Hugging Face's format."""

    name: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """`normal` for linears and embeddings, `ones` for norms' scales, `zeros` for biases.

        Raises ValueError for a tensor that is none of these: a plausible guess would train, but be wrong.
        """
        if len(self.shape) == 2 and self.name.endswith("weight"):
            return "normal"
        if len(self.shape) == 1 and self.name.endswith("bias"):
            return "zeros"
        if len(self.shape) == 1 and self.name.endswith("weight") and "norm" in self.name:
            return "ones"
        raise ValueError(f"no rule says how {self.name} {list(self.shape)} is initialised")


def draw(
    weight: Weight, std: float, seed: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The whole first value of a tensor on `device`.

    std: of `normal` tensors, the configuration's ``initializer_range``. Values are drawn in float32 and then
    cast, so a model begins alike in every precision. CPU and GPU generators give different values.
    """
    whole = torch.empty(weight.shape, dtype=torch.float32, device=device)
    if weight.kind == "normal":
        digest = hashlib.sha256(f"{seed}:{weight.name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        whole.normal_(0.0, std, generator=generator)
    else:
        whole.fill_(1.0 if weight.kind == "ones" else 0.0)
    return whole.to(dtype)


def llama_weights(config: Mapping[str, Any]) -> list[Weight]:
    """Every tensor of a Llama-shaped model (model types ``llama`` and ``qwen3``), in the order of use.

    config: the architecture's JSON with Hugging Face's keys. A tied head is not listed: it is the embedding.
    Raises ValueError for another model type.
    """
    if config["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"model type {config['model_type']!r} is not Llama-shaped (llama, qwen3)")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    weights = [Weight("model.embed_tokens.weight", (vocabulary, hidden))]
    for index in range(config["num_hidden_layers"]):
        weights += _llama_layer(config, f"model.layers.{index}.")
    weights.append(Weight("model.norm.weight", (hidden,)))
    if not config.get("tie_word_embeddings", False):
        weights.append(Weight("lm_head.weight", (vocabulary, hidden)))
    return weights


def _llama_layer(config: Mapping[str, Any], prefix: str) -> list[Weight]:
    hidden, intermediate, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    head_dim = config.get("head_dim") or hidden // heads
    queries = heads * head_dim
    keys = (config.get("num_key_value_heads") or heads) * head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    weights = []
    for name, shape in linears.items():
        weights.append(Weight(f"{prefix}{name}.weight", shape))
        if config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias", False):
            weights.append(Weight(f"{prefix}{name}.bias", shape[:1]))
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    return weights + [Weight(f"{prefix}{name}.weight", (size,)) for name, size in norms.items()]


def hf_tensors(
    config: Mapping[str, Any], seed: int, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Llama-shaped model, one at a time: (name, whole first value)."""
    std = config.get("initializer_range", 0.02)
    for weight in llama_weights(config):
        yield weight.name, draw(weight, std, seed, dtype, device)
