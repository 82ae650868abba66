# SPDX-License-Identifier: Apache-2.0
"""The same training with transformers and plain torch on one process: what every layout must agree with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.func import functional_call
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from lora_suite.blueprint.shape import ModelShape, read_shape
from lora_suite.train.backends.megatron.weights import LAYER_NORMS, held_linears, unstack
from lora_suite.train.batch import IGNORED, MicroBatch
from lora_suite.train.models.initialise import hf_tensors
from tests.train.megatron.ranks import LEARNING_RATE, MAX_NORM, RECIPES, STEPS, global_batch, supervised

CONFIG = RECIPES / "models" / "tiny-llama.json"
BETAS, EPS, DECAY, SEED = (0.9, 0.98), 1e-3, 0.1, 42
SCALE = 32 / 8

Weights = dict[str, torch.Tensor]
Model = TypeVar("Model", bound=torch.nn.Module)


def shape() -> ModelShape:
    """The tiny model's."""
    return read_shape(CONFIG)


def tiny_llama() -> LlamaForCausalLM:
    """transformers' own tiny Llama with the first weights, in float64."""
    config = json.loads(CONFIG.read_text())
    model = in_float64(LlamaForCausalLM(LlamaConfig(**config)))
    weights = hf_tensors(shape(), config["initializer_range"], SEED, torch.float64, torch.device("cpu"))
    model.load_state_dict(dict(weights))
    return model


def in_float64(model: Model) -> Model:
    """A model of transformers in float64. Its norms stay in float32 even then: torch's take their place."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon)
            norm.load_state_dict(module.state_dict())
            model.set_submodule(name, norm)
    return model.double()


def loss_sum(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], batch: MicroBatch) -> torch.Tensor:
    """Summed token loss of a micro batch under other weights."""
    logits = functional_call(model, dict(weights), (batch.input_ids,)).logits
    return functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def train(
    model: torch.nn.Module,
    trained: Weights,
    effective: Callable[[Weights], Mapping[str, torch.Tensor]],
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train leaves with torch's AdamW and clipping.

    effective: the model's weights as a function of the leaves. Returns the curve of (loss, norm), the first
    gradients, and the leaves after the first step (`updated`) and the last (`last`).
    """
    leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
    optimizer = torch.optim.AdamW(leaves.values(), LEARNING_RATE, BETAS, EPS, DECAY)
    batches, curve = global_batch(), []
    result: dict[str, Any] = {}
    for step in range(steps):
        total = torch.stack([loss_sum(model, effective(leaves), batch) for batch in batches]).sum()
        loss = total / supervised(batches)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            result["gradients"] = {name: leaf.grad.clone() for name, leaf in leaves.items()}
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), MAX_NORM)
        curve.append((float(loss.detach()), float(norm)))
        optimizer.step()
        if step == 0:
            result["updated"] = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    last = {name: leaf.detach() for name, leaf in leaves.items()}
    return {**result, "curve": curve, "last": last}


def merged(base: Weights, factors: Weights) -> Weights:
    """Weights W + scale · B·A for canonical adapters."""
    weights = dict(base)
    for key, a in factors.items():
        if key.endswith(".a"):
            name = key.removesuffix(".a")
            weights[f"{name}.weight"] = base[f"{name}.weight"] + SCALE * factors[f"{name}.b"] @ a
    return weights


def merged_fused(base: Weights, factors: Weights) -> Weights:
    """The same for fused adapters, by hand for two groups of two query heads of 16 channels."""
    weights = dict(base)
    for key, a in factors.items():
        if not key.endswith(".a"):
            continue
        name = key.removesuffix(".a")
        update = SCALE * factors[f"{name}.b"] @ a
        layer = f"model.layers.{name.split('.')[2]}."
        if name.endswith("linear_qkv"):
            groups = update.view(2, 4, 16, 64)  # of a group: query, query, key, value
            parts = {
                "self_attn.q_proj": groups[:, :2].reshape(64, 64),
                "self_attn.k_proj": groups[:, 2].reshape(32, 64),
                "self_attn.v_proj": groups[:, 3].reshape(32, 64),
            }
        elif name.endswith("linear_fc1"):
            parts = {"mlp.gate_proj": update[:128], "mlp.up_proj": update[128:]}
        else:
            parts = {"self_attn.o_proj" if name.endswith("linear_proj") else "mlp.down_proj": update}
        for part, value in parts.items():
            weights[f"{layer}{part}.weight"] = base[f"{layer}{part}.weight"] + value
    return weights


def whole_tensors(
    shape: ModelShape, name: str, first_layer: int, shards: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a transformers model that one Megatron parameter holds, from all tensor parallel ranks.

    A tied head has no tensor of its own.
    """
    if name == "embedding.word_embeddings.weight":
        return {"model.embed_tokens.weight": torch.cat([*shards])}
    if name == "output_layer.weight":
        return {} if shape.tied_head else {"lm_head.weight": torch.cat([*shards])}
    if name == "decoder.final_layernorm.weight":
        return {"model.norm.weight": shards[0]}
    _, _, layer, path = name.split(".", 3)
    path, _, kind = path.rpartition(".")
    prefix = f"model.layers.{first_layer + int(layer)}."
    if path in LAYER_NORMS or path == "mlp.router":
        return {f"{prefix}{LAYER_NORMS.get(path, 'mlp.gate')}.{kind}": shards[0]}
    parts = [f"{prefix}{part}.{kind}" for part in held_linears(path)]
    if len(parts) == 1:
        return {parts[0]: torch.cat([*shards], 1)}
    rows = zip(*(unstack(path, shard, shape) for shard in shards), strict=True)
    return {part: torch.cat(own) for part, own in zip(parts, rows, strict=True)}
