# SPDX-License-Identifier: Apache-2.0
"""What the fast path can do, and how a loaded model takes it."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from lora_suite.blueprint.facts import Blueprint
from lora_suite.config.schema import MegatronOptimizer, Recipe
from lora_suite.train.backends.base import NO_GPU, Backend
from lora_suite.train.backends.megatron.attach import HEAD_NAMES
from lora_suite.train.backends.megatron.fast.backend import FastMegatronBackend
from lora_suite.train.backends.megatron.fast.modules import (
    FastColumnParallelLinear,
    FastLayer,
    FastRowParallelLinear,
    HeadNorm,
)
from lora_suite.train.backends.megatron.model import LayerModules
from lora_suite.train.backends.megatron.optimizer import adapter_optimizer, is_replica
from lora_suite.train.fast.layer_ops import NO_KERNELS, layer_ops
from lora_suite.train.fast.linears import FramedLinear, beside_op, thin_ops
from lora_suite.train.fast.masters import MasterWeights, Weights, WholeWeights
from lora_suite.train.fast.zero import ShardedWeights
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.topology import Topology

FAST = LayerModules(FastColumnParallelLinear, FastRowParallelLinear, HeadNorm)


def slow_path_reason(recipe: Recipe, blueprint: Blueprint, device: torch.device) -> str | None:
    """Why a recipe does not take the fast path; None where it does. blueprint: with the model's shape."""
    if device.type != "cuda":
        return NO_GPU
    if recipe.policy.megatron_cfg.fast_path == "off":
        return "policy.megatron_cfg.fast_path is off"
    return refusal(recipe, blueprint)


def refusal(recipe: Recipe, blueprint: Blueprint) -> str | None:
    """Why this training cannot take the fast path; None where it can. Names the key."""
    policy, parallel = recipe.policy, recipe.policy.megatron_cfg
    lora = parallel.lora_cfg
    reasons = {
        "pipeline_model_parallel_size is above 1": parallel.pipeline_model_parallel_size > 1,
        "sequence_parallel is on": parallel.sequence_parallel,
        "activation_checkpointing is on": parallel.activation_checkpointing,
        "data.pad_to_max_length is off, so lengths vary": (
            not recipe.data.pad_to_max_length and not policy.sequence_packing.enabled
        ),
        "the model has routed experts": blueprint.model is not None and blueprint.model.moe is not None,
        "lora_cfg.dropout is not 0": lora.enabled and lora.dropout > 0.0,
        "lora_cfg.lora_dtype is not the model's": (
            lora.enabled and lora.lora_dtype not in (None, policy.precision)
        ),
        "the head has an adapter": any(site.name in HEAD_NAMES for site in blueprint.adapters),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def fast_backend(
    model: GPTModel, topology: Topology, bank: AdapterBank | None, optimizer: MegatronOptimizer
) -> Backend:
    """The fast backend of a loaded model of `FAST` modules; bank: of its adapters, if these train."""
    gpu = topology.device.type == "cuda"
    dtype = model.config.params_dtype
    ops = layer_ops(dtype) if gpu else NO_KERNELS
    for index, layer in enumerate(model.decoder.layers):
        model.decoder.layers[index] = FastLayer(layer, ops)
    if bank is not None:
        for frame in model.modules():
            if isinstance(frame, FramedLinear):
                frame.join(bank.span(list(frame.by_position.values())))
                if gpu and dtype != torch.float64:
                    frame.use(thin_ops())
                    frame.beside = beside_op()
        return FastMegatronBackend(model, topology, bank, ops, gpu=gpu)
    masters = MasterWeights(_trained_weights(model, topology), topology, adapter_optimizer(optimizer), gpu)
    return FastMegatronBackend(model, topology, masters, ops, gpu=gpu)


def _trained_weights(model: GPTModel, topology: Topology) -> Weights:
    """Every weight: whole where there is one data parallel rank, else in buckets, one a layer."""
    replicas = [parameter for parameter in model.parameters() if is_replica(parameter)]
    if topology.dp.size == 1:
        return WholeWeights(list(model.parameters()), replicas)
    parts = (model.embedding, *model.decoder.layers, model.output_layer)
    buckets = [[each for each in part.parameters() if not is_replica(each)] for part in parts]
    return ShardedWeights([replicas, *filter(None, buckets)], [0], topology.dp)
