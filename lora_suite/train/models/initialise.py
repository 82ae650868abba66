# SPDX-License-Identifier: Apache-2.0
"""The first weights of a model, in Hugging Face's names and shapes.

A tensor's values depend on (seed, its name) and the kind of device alone: not on the backend, the parallel
layout, the precision, the order of creation, or a library's own initialisation. So two backends that map the
same names start from the same model, and a rank that holds a shard draws the whole tensor and keeps its part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from lora_suite.blueprint.linears import Linear, model_linears
from lora_suite.blueprint.shape import ModelShape

Kind = Literal["normal", "ones", "zeros", "uniform", "log_range", "time_steps"]

_LEAST_STEP, _MOST_STEP = 1e-3, 0.1
"""Between which a Mamba head's time step starts, on a logarithmic scale (https://arxiv.org/abs/2405.21060)."""


_MAMBA: dict[str, Kind] = {"A_log": "log_range", "D": "ones", "dt_bias": "time_steps"}


@dataclass(frozen=True)
class Weight:
    """One tensor of a model: its name and whole shape in Hugging Face's format."""

    name: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """`normal` for linears, embeddings and experts, `ones` for norms' scales, `zeros` for biases.

        Of a Mamba mixer besides: `log_range` for the decays (that of head h starts at h), `ones` for the
        skip D, `time_steps` for the bias of the steps, `uniform` for the convolution, like torch's own.
        Raises ValueError for a tensor that is none of these: a plausible guess would train, but be wrong.
        """
        last = self.name.rpartition(".")[2]
        if last in _MAMBA and len(self.shape) == 1:
            return _MAMBA[last]
        if len(self.shape) == 3 and ".experts." in self.name:
            return "normal"
        if len(self.shape) == 3 and self.name.endswith("conv1d.weight"):
            return "uniform"
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
    digest = hashlib.sha256(f"{seed}:{weight.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    match weight.kind:
        case "normal":
            whole.normal_(0.0, std, generator=generator)
        case "uniform":
            bound = 1.0 / math.sqrt(math.prod(weight.shape[1:]))
            whole.uniform_(-bound, bound, generator=generator)
        case "log_range":
            whole.copy_(torch.arange(1, len(whole) + 1, device=device).log())
        case "time_steps":
            whole.uniform_(math.log(_LEAST_STEP), math.log(_MOST_STEP), generator=generator)
            # What softplus takes to the step: log(exp(step) - 1).
            whole.exp_().expm1_().log_()
        case constant:
            whole.fill_(1.0 if constant == "ones" else 0.0)
    return whole.to(dtype)


def llama_weights(shape: ModelShape) -> list[Weight]:
    """Every tensor of a Llama-shaped model (families llama, qwen2, qwen3, qwen3_moe), the norms last.

    A tied head is not listed: it is the embedding. Experts are listed one by one, as in the hub's files.
    Raises ValueError for a hybrid model.
    """
    if shape.hybrid is not None:
        raise ValueError(f"a {shape.family} model is not Llama-shaped")
    weights = [Weight("model.embed_tokens.weight", (shape.vocab, shape.hidden))]
    for linear in model_linears(shape):
        if linear.kind == "head" and shape.tied_head:
            continue
        if linear.kind == "experts":
            weights += _experts(linear)
            continue
        weights.append(Weight(f"{linear.name}.weight", (linear.out_features, linear.in_features)))
        if linear.bias:
            weights.append(Weight(f"{linear.name}.bias", (linear.out_features,)))
    return weights + list(_norms(shape))


def _experts(stack: Linear) -> Iterator[Weight]:
    """The weights of a stack of experts, each under the name of its own linear."""
    prefix, _, name = stack.name.rpartition(".")
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    for index in range(stack.count):
        for part in parts:
            size = (stack.out_features // len(parts), stack.in_features)
            yield Weight(f"{prefix}.{index}.{part}.weight", size)


def _norms(shape: ModelShape) -> Iterator[Weight]:
    """The scale of every norm: two a layer, one at the end, and one each for query and key heads (qwen3)."""
    sizes = {"input_layernorm": shape.hidden, "post_attention_layernorm": shape.hidden}
    if shape.qk_norm:
        sizes |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    for index in range(shape.layers):
        for name, size in sizes.items():
            yield Weight(f"model.layers.{index}.{name}.weight", (size,))
    yield Weight("model.norm.weight", (shape.hidden,))


def hf_tensors(
    shape: ModelShape, std: float, seed: int, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Llama-shaped model, one at a time: (name, whole first value); see `draw`."""
    for weight in llama_weights(shape):
        yield weight.name, draw(weight, std, seed, dtype, device)
