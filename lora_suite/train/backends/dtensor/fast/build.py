# SPDX-License-Identifier: Apache-2.0
"""From a recipe to the fast path: what it can do, and how it is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.memory import mlps_in_one
from lora_suite.blueprint.sharding import named_sharding, plan_memory
from lora_suite.blueprint.targets import AdapterSite
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.backends.dtensor.adapters import attach_peft
from lora_suite.train.backends.dtensor.build import place
from lora_suite.train.backends.dtensor.fast.backend import FastBackend
from lora_suite.train.backends.dtensor.fast.decoder import STACKS, Decoder
from lora_suite.train.backends.dtensor.fast.hybrid import STACKS as HYBRID_STACKS
from lora_suite.train.backends.dtensor.fast.hybrid import HybridDecoder
from lora_suite.train.backends.dtensor.fast.hybrid_build import build_hybrid, hybrid_refusals
from lora_suite.train.backends.dtensor.fast.peft import TransformersDecoder
from lora_suite.train.backends.dtensor.parallel import build_layout, placement_of
from lora_suite.train.data.slicing import round_up
from lora_suite.train.fast.apart import ExpertsApart
from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.experts import StackedExperts
from lora_suite.train.fast.layer_ops import NO_KERNELS, layer_ops
from lora_suite.train.fast.linears import THIN, FramedLinear, StackedLinear, beside_op, thin_ops
from lora_suite.train.fast.masters import MasterWeights, Weights, WholeWeights
from lora_suite.train.fast.rotary import Rotation
from lora_suite.train.fast.zero import ShardedWeights
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.experts import ExpertAdapter
from lora_suite.train.lora.spec import DTYPES, LoraSpec
from lora_suite.train.models.causal_lm import build_on_meta, load_config, materialise_buffers, weight_source
from lora_suite.train.topology import Topology

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STACK_OF = {
    name: (stack, position)
    for stacks in (STACKS, HYBRID_STACKS)
    for stack, names in stacks.items()
    for position, name in enumerate(names)
}


def refusal(recipe: Recipe, blueprint: Blueprint, memory: int) -> str | None:
    """Why this training cannot take the fast path; None where it can. Names the key.

    memory: bytes of the device, which the memory model must find enough for weights that are held whole.
    """
    if blueprint.model is None:
        return "the model's shape is not known"
    named = named_sharding(recipe)
    if named is not None:
        return f"{named}, and the fast path holds weights whole"
    plan = plan_memory(recipe, blueprint, memory, fast=True)
    dtensor, lora = recipe.policy.dtensor_cfg, recipe.policy.dtensor_cfg.lora_cfg
    selective = dtensor.activation_checkpointing == "selective"
    hybrid = blueprint.model.hybrid
    reasons = {
        "data.pad_to_max_length is off, so lengths vary": not (
            recipe.data.pad_to_max_length or recipe.policy.sequence_packing.enabled
        ),
        f"{plan.estimate} by the memory model are too much of the GPU's": plan.too_large,
        "activation_checkpointing is on": dtensor.activation_checkpointing is True,
        "activation_checkpointing is selective, and the layers are PEFT's": (
            selective and lora.enabled and lora.implementation == "peft"
        ),
        "activation_checkpointing is selective, and there are no kernels of float64": (
            selective and recipe.policy.precision == "float64"
        ),
        "recompute_mlp_layers is set, and some MLP has a bias or no adapters on a side of its activation": (
            dtensor.recompute_mlp_layers > 0 and not mlps_in_one(blueprint)
        ),
        "lora_cfg.dropout is not 0": lora.enabled and lora.dropout > 0.0,
        "lora_cfg.lora_dtype is not the model's": (
            lora.enabled
            and lora.implementation != "peft"
            and lora.lora_dtype not in (None, recipe.policy.precision)
        ),
        "tensor_parallel_size is above 1, and o_proj or down_proj has a bias": (
            dtensor.tensor_parallel_size > 1 and _row_bias(blueprint)
        ),
        "a linear outside the layers has an adapter": any(
            _place(site) is None for site in blueprint.adapters
        ),
    }
    if hybrid is not None:
        reasons |= hybrid_refusals(recipe, hybrid)
    return next((reason for reason, holds in reasons.items() if holds), None)


def build(
    recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device, *, gpu: bool
) -> Backend:
    """Build the fast backend of a recipe that `refusal` accepts; `torch.distributed` must be initialised.

    gpu: compile and capture. Raises ConfigError like the eager backend's build.
    """
    policy = recipe.policy
    dtype = DTYPES[policy.precision]
    parallel = policy.dtensor_cfg
    layout = build_layout(device, parallel.tensor_parallel_size, 1, parallel.expert_parallel_size)
    topology = layout.topology
    tp = TensorParallel.over(topology.tp)
    config = load_config(recipe, recipe_path)
    shape = blueprint.model
    assert shape is not None, "refused where the shape is not known"
    lora = policy.dtensor_cfg.lora_cfg
    if lora.enabled and lora.implementation == "peft":
        return _build_peft(recipe, recipe_path, blueprint, topology, gpu=gpu)
    adapters: dict[str, dict[int, Adapter]] = {}
    bank = None
    if lora.enabled:
        spec = LoraSpec.from_config(lora, recipe.sft.seed)
        adapters = _adapters(blueprint.adapters, spec, topology)
        bank = AdapterBank([each for stack in adapters.values() for each in stack.values()], topology, dtype)

    def make(name: str, inputs: int, widths: tuple[int, ...], bias: bool) -> StackedLinear | FramedLinear:
        if name in adapters and bank is not None:
            linear = FramedLinear(inputs, widths, bias, adapters[name], dtype, device)
            linear.join(bank.span(list(linear.by_position.values())))
            if gpu:
                if lora.use_triton:
                    linear.use(thin_ops())
                if shape.hybrid is None:
                    linear.beside = beside_op()
            return linear
        return StackedLinear(inputs, widths, bias, dtype, device)

    model: Decoder | HybridDecoder
    source = weight_source(recipe, recipe_path, config, device)
    if shape.hybrid is not None:
        from lora_suite.train.models.nemotron_h import own_experts

        source = own_experts(source, topology.ep)
        model = build_hybrid(
            shape,
            config,
            make,
            adapters,
            ep=topology.ep,
            trained=bank is None,
            dtype=dtype,
            device=device,
            gpu=gpu,
        )
    else:
        on_meta = build_on_meta(config, dtype)
        materialise_buffers(on_meta, device)
        model = Decoder(
            shape,
            config.rms_norm_eps,
            _rotation(on_meta, recipe, device),
            make,
            trained=bank is None,
            dtype=dtype,
            device=device,
            ops=layer_ops(dtype, parallel.activation_checkpointing == "selective") if gpu else NO_KERNELS,
            tp=tp,
            anew=parallel.recompute_mlp_layers,
        )
    if bank is not None:
        for module in model.modules():
            if isinstance(module, StackedLinear | StackedExperts):
                module.requires_grad_(False)
    weights = None if bank is not None else _trained_weights(model, topology)
    model.load(source)
    if bank is not None:
        bank.build_optimizer(policy.optimizer)
        if gpu and lora.use_triton and topology.rank == 0:
            _say_where_kernels_are_not(model)
        return FastBackend(model, topology, bank, gpu=gpu)
    assert weights is not None, "without adapters every weight is trained"
    masters = MasterWeights(weights, topology, policy.optimizer, compiled=gpu)
    return FastBackend(model, topology, masters, gpu=gpu)


def _say_where_kernels_are_not(model: nn.Module) -> None:
    framed = [linear for linear in model.modules() if isinstance(linear, FramedLinear)]
    without = sum(linear.thin is None for linear in framed)
    if without:
        print(
            f"use_triton: {without} of {len(framed)} stacks have frames of over {THIN} columns, or float64: "
            "their products are the library's"
        )


def _build_peft(
    recipe: Recipe, recipe_path: Path, blueprint: Blueprint, topology: Topology, *, gpu: bool
) -> Backend:
    """transformers' model with PEFT's layers, from the same weights and factors."""
    lora, device = recipe.policy.dtensor_cfg.lora_cfg, topology.device
    config, dtype = load_config(recipe, recipe_path), DTYPES[recipe.policy.precision]
    model = build_on_meta(config, dtype)
    spec = LoraSpec.from_config(lora, recipe.sft.seed)
    bank = attach_peft(model, blueprint.adapters, spec, topology, dtype)
    place(model, weight_source(recipe, recipe_path, config, device), device)
    bank.build_optimizer(recipe.policy.optimizer)
    return FastBackend(TransformersDecoder(model, _rotation(model, recipe, device)), topology, bank, gpu=gpu)


def _trained_weights(model: Decoder | HybridDecoder, topology: Topology) -> Weights:
    """Every weight: whole where there is one data parallel rank, else in buckets, one a layer.

    Experts that ranks split are apart: in buckets of their own, and whole where no other rank has the same.
    """
    replicas = list(model.replicas())
    if topology.dp.size == 1:
        return WholeWeights([each for each in model.parameters() if each.requires_grad], replicas)
    ends = {id(each): each for each in (model.embedding, model.head)}
    layers, experts = [], []
    for linears in model.by_layer():
        apart = [each for each in linears if isinstance(each, StackedExperts) and topology.ep.size > 1]
        layers.append([each for linear in linears if linear not in apart for each in linear.parameters()])
        experts.append([each.weight for each in apart])
    buckets = [replicas, *([each] for each in ends.values()), *filter(None, layers)]
    split = [*filter(None, experts)]
    trained = sorted(id(each) for each in model.parameters() if each.requires_grad)
    assert sorted(id(each) for bucket in (*buckets, *split) for each in bucket) == trained, "each in one"
    rest = ShardedWeights(buckets, [0], topology.dp)
    if not split:
        return rest
    same = topology.same_experts
    if same.size > 1:
        return ExpertsApart(rest, ShardedWeights(split, [], same), topology.ep)
    return ExpertsApart(rest, WholeWeights([each for bucket in split for each in bucket], []), topology.ep)


def _row_bias(blueprint: Blueprint) -> bool:
    return blueprint.model is not None and (blueprint.model.o_bias or blueprint.model.mlp_bias)


def _place(site: AdapterSite) -> tuple[str, int] | None:
    """The layer's stack and the position in it where a site's linear lies; None outside the layers."""
    parts = site.name.split(".")
    layer, linear = ".".join(parts[:3]), ".".join(parts[3:])
    stack = _STACK_OF.get(linear)
    return None if stack is None else (f"{layer}.{stack[0]}", stack[1])


def _adapters(
    sites: Sequence[AdapterSite], spec: LoraSpec, topology: Topology
) -> dict[str, dict[int, Adapter]]:
    """Adapters by layer's stack and position."""
    made: dict[str, dict[int, Adapter]] = {}
    for site in sites:
        place = _place(site)
        assert place is not None, site.name
        size, stack = (site.in_features, site.out_features), made.setdefault(place[0], {})
        if site.experts is not None:
            # The form is of the adapter's own product, which the experts here make themselves.
            stack[place[1]] = ExpertAdapter(site.name, *size, spec, site.experts, "grouped", topology.ep)
            continue
        placement = placement_of(site.name) if topology.tp.size > 1 else "none"
        stack[place[1]] = Adapter(site.name, *size, spec, placement, topology.tp)
    return made


def _rotation(model: PreTrainedModel, recipe: Recipe, device: torch.device) -> Rotation:
    """Cosines and sines of every position that a row can have, by the model's own rotary module."""
    policy = recipe.policy
    length = round_up(policy.max_total_sequence_length, policy.make_sequence_length_divisible_by)
    positions = torch.arange(length, device=device)[None]
    x = torch.empty(1, dtype=DTYPES[policy.precision], device=device)
    cos, sin = model.get_submodule("model.rotary_emb")(x, positions)
    return cos[0], sin[0]
