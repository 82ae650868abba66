# SPDX-License-Identifier: Apache-2.0
"""From tensors with Hugging Face's names to this rank's Megatron shards.

Megatron-core stacks linears that read the same input. Over tensor parallel ranks (tp of them):

    linear_qkv      rows, by group of heads in turn: its queries, its key, its value; a rank has whole groups
    linear_fc1      rows: a rank's of gate, then its of up
    linear_proj, linear_fc2         columns
    word_embeddings, output_layer   rows; the vocabulary must divide by tp, nothing is padded
    norms, router   whole

Experts are kept one by one, each with a linear_fc1 and a linear_fc2 like an MLP's. Every rank takes its part
from the whole tensor, so no layout changes a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from lora_suite.blueprint.shape import ModelShape
from lora_suite.config.errors import ConfigError
from lora_suite.train.models.initialise import draw, llama_weights
from lora_suite.train.topology import Axis

Fetch = Callable[[str], torch.Tensor]
"""Gives a whole tensor by its Hugging Face name."""

# Each linear of a Megatron layer and the Hugging Face linears that it holds, in order.
LAYER_LINEARS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
LAYER_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])")
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def held_linears(path: str) -> tuple[str, ...]:
    """The Hugging Face linears that a linear of a Megatron layer holds, in order."""
    if path == "mlp.router":
        return ("mlp.gate",)
    expert = EXPERT.fullmatch(path)
    if expert is None:
        return LAYER_LINEARS[path]
    parts = LAYER_LINEARS[f"mlp.{expert[2]}"]
    return tuple(part.replace("mlp.", f"mlp.experts.{expert[1]}.") for part in parts)


def _in_layer(name: str, first_layer: int) -> tuple[str, tuple[str, ...]]:
    """A Megatron parameter's path in its layer, and the full names of the Hugging Face tensors it holds."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        raise KeyError(f"{name} has no counterpart in Hugging Face's names")
    path, prefix = match[2], f"model.layers.{first_layer + int(match[1])}."
    held = (LAYER_NORMS[path],) if path in LAYER_NORMS else held_linears(path)
    return path, tuple(f"{prefix}{part}.{match[3]}" for part in held)


def unstack(path: str, rows: torch.Tensor, shape: ModelShape) -> tuple[torch.Tensor, ...]:
    """The rows of each linear that a stacking Megatron linear holds, out of its own rows or some ranks' part.

    path: of that linear, whose last name says how it stacks. rows: [out] or [out, in].
    """
    if path.endswith("linear_qkv"):
        sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
    else:
        sizes = [len(rows) // 2] * 2
    groups = rows.view(-1, sum(sizes), *rows.shape[1:])
    return tuple(part.flatten(0, 1) for part in torch.split(groups, sizes, 1))


@dataclass(frozen=True)
class ShardMap:
    """Maps names and values of one model over one tensor parallel axis."""

    shape: ModelShape
    tp: Axis

    def load(self, model: nn.Module, first_layer: int, fetch: Fetch) -> None:
        """Fill every parameter of a GPTModel in place.

        first_layer: index in the whole model of this stage's first layer.
        """
        for name, parameter in model.named_parameters():
            value = self.local(name, first_layer, fetch)
            if value.shape != parameter.shape:
                raise ValueError(f"{name}: shard {list(value.shape)} for {list(parameter.shape)}")
            with torch.no_grad():
                parameter.copy_(value)

    def local(self, name: str, first_layer: int, fetch: Fetch) -> torch.Tensor:
        """This rank's value of one Megatron parameter. KeyError for a name that has no counterpart."""
        if name == "embedding.word_embeddings.weight":
            return self._part(fetch(EMBEDDING), 0)
        if name == "output_layer.weight":
            return self._part(fetch(EMBEDDING if self.shape.tied_head else HEAD), 0)
        if name == "decoder.final_layernorm.weight":
            return fetch(FINAL_NORM)
        path, names = _in_layer(name, first_layer)
        parts = [fetch(part) for part in names]
        if path == "mlp.router" or path in LAYER_NORMS:
            return parts[0]
        if len(parts) == 1:
            return self._part(parts[0], 1)
        # Rows are split over ranks part by part, then stacked within each group of heads.
        groups = self.shape.kv_heads // self.tp.size if "qkv" in path else 1
        rows = [self._part(part, 0) for part in parts]
        rows = [part.view(groups, -1, *part.shape[1:]) for part in rows]
        return torch.cat(rows, 1).flatten(0, 1)

    def _part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(self.tp.size, dim)[self.tp.index]


def drawn(shape: ModelShape, std: float, seed: int, dtype: torch.dtype, device: torch.device) -> Fetch:
    """Fetch from the first weights that both backends share, drawn on `device`."""
    weights = {weight.name: weight for weight in llama_weights(shape)}
    return lambda name: draw(weights[name], std, seed, dtype, device)


def stored(folder: Path) -> Fetch:
    """Fetch from the safetensors of a pretrained model, one file or several with an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            files = dict.fromkeys(tensors.keys(), "model.safetensors")
    else:
        raise ConfigError(
            f"policy.model_name: {folder} has no model.safetensors; save the model in that format, "
            f"or set policy.init=random"
        )
    handles = {name: safe_open(folder / name, framework="pt") for name in sorted(set(files.values()))}

    def fetch(name: str) -> torch.Tensor:
        if name not in files:
            raise ConfigError(f"policy.model_name: {folder} has no tensor {name}")
        tensor: torch.Tensor = handles[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    return fetch
