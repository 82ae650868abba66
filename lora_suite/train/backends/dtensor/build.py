# SPDX-License-Identifier: Apache-2.0
"""From a recipe to a model that is split, adapted, sharded, and filled with its first weights.

The order matters. On the meta device: tensor parallelism, then freezing and adapters. The adapters' bank is
real from the start, so that sharding can leave its parameters alone. Then layer by layer: real weights, then
FSDP2 around them, so that a rank holds one whole layer more than its shards at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.sharding import plan_memory
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.backends.dtensor.adapters import Attach, attach_adapters, attach_peft, plain_name
from lora_suite.train.backends.dtensor.backend import DTensorBackend
from lora_suite.train.backends.dtensor.full import FullParameters, Places
from lora_suite.train.backends.dtensor.parallel import (
    HYBRID,
    build_layout,
    check_family,
    decoder_layers,
    prefetch_layers,
    shard,
    split_layers,
)
from lora_suite.train.backends.dtensor.recompute import recompute_layers
from lora_suite.train.lora.spec import DTYPES, LoraSpec
from lora_suite.train.models.causal_lm import (
    WeightSource,
    build_on_meta,
    load_config,
    materialise,
    materialise_buffers,
    weight_source,
)
from lora_suite.train.models.initialise import Weight
from lora_suite.train.process import device_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Wrap = Callable[..., None]


def build(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> Backend:
    """Build the backend of a recipe on this rank; `torch.distributed` must be initialised.

    blueprint: of the same recipe; says which linears get adapters. Raises ConfigError for an architecture or
    weights that cannot be had, and for an adapter of something that is not a linear of the model.
    """
    policy = recipe.policy
    lora = policy.dtensor_cfg.lora_cfg
    compute_dtype = DTYPES[policy.precision]
    masters = policy.precision == "bfloat16" and not lora.enabled
    parallel = policy.dtensor_cfg
    plan = plan_memory(recipe, blueprint, device_memory(device), fast=False)
    layout = build_layout(
        device,
        parallel.tensor_parallel_size,
        plan.layout.replicas,
        parallel.expert_parallel_size,
    )
    topology = layout.topology
    config = load_config(recipe, recipe_path)
    check_family(config.model_type)
    model = build_on_meta(config, torch.float32 if masters else compute_dtype)
    source = weight_source(recipe, recipe_path, config, device)
    wrap: _Wrap = partial(shard, mesh=layout.fsdp_mesh, shards=layout.shards.size)
    experts: frozenset[str] = frozenset()
    if config.model_type == HYBRID:
        from lora_suite.train.backends.dtensor import hybrid

        source = hybrid.prepare_hybrid(model, source, parallel, layout, compute_dtype)
        experts = hybrid.split_stacks(model, layout)
        wrap = partial(hybrid.shard_hybrid, layout=layout)
    if topology.tp.size > 1:
        split_layers(model, layout.tp_mesh)
    bank = None
    if lora.enabled:
        spec = LoraSpec.from_config(lora, recipe.sft.seed)
        attach: Attach = attach_peft if lora.implementation == "peft" else attach_adapters
        bank = attach(model, blueprint.adapters, spec, topology, compute_dtype)
    # FSDP2 also keeps the float32 masters of bfloat16 training, so there it is used on one dp rank, too.
    # Without it nothing would sum the gradients of full SFT over replicas, either.
    sharded = layout.shards.size > 1 or masters or (bank is None and topology.dp.size > 1)
    ignored = set(bank.parameters()) if bank is not None else set()
    place(model, source, device, partial(wrap, masters=masters, ignored=ignored) if sharded else None)
    if layout.shards.size > 1:
        prefetch_layers(model)
    if parallel.activation_checkpointing:
        selective = parallel.activation_checkpointing == "selective"
        dropout = bank.generator if bank is not None else None
        recompute_layers(model, dropout, selective, parallel.recompute_mlp_layers)
    model.train()
    if bank is None:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        places = Places(topology, layout.shards, layout.expert_shards, experts)
        trained = FullParameters(named, places, policy.optimizer)
        return DTensorBackend(model, topology, trained)
    bank.build_optimizer(policy.optimizer)
    return DTensorBackend(model, topology, bank)


def place(
    model: PreTrainedModel,
    source: WeightSource,
    device: torch.device,
    wrap: Callable[[nn.Module], None] | None = None,
) -> None:
    """Make the model real on `device`, layer by layer and then the rest, wrapping each part when it is."""
    materialise_buffers(model, device)

    def of_plain_name(weight: Weight) -> torch.Tensor:
        return source(replace(weight, name=plain_name(weight.name)))

    for name, module in (*decoder_layers(model), ("", model)):
        materialise(module, name, of_plain_name, device)
        if wrap is not None:
            wrap(module)
