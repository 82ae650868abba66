# SPDX-License-Identifier: Apache-2.0
"""Layouts of a hybrid model's parts that are not sharded like the rest: split experts, and frozen routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lora_suite.config.schema import DTensor
from lora_suite.train.backends.dtensor.parallel import Layout, shard
from lora_suite.train.lora.grouped import form_for
from lora_suite.train.models.causal_lm import WeightSource
from lora_suite.train.models.nemotron_h import STACKS, expert_modules, own_experts, prepare, routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_hybrid(
    model: PreTrainedModel, source: WeightSource, config: DTensor, layout: Layout, dtype: torch.dtype
) -> WeightSource:
    """Make a model on the meta device ours, in place; return a source of this rank's share of its weights.

    dtype: in which experts multiply.
    """
    ep = layout.topology.ep
    asked = config.experts_implementation
    prepare(model, form_for(layout.topology.device, dtype) if asked == "auto" else asked, ep)
    return own_experts(source, ep)


def split_stacks(model: nn.Module, layout: Layout) -> frozenset[str]:
    """Names of the parameters that expert parallel ranks hold different parts of."""
    if layout.topology.ep.size == 1:
        return frozenset()
    return frozenset(f"{name}.{stack}" for name, _ in expert_modules(model) for stack in STACKS)


def shard_hybrid(module: nn.Module, layout: Layout, masters: bool, ignored: set[nn.Parameter]) -> None:
    """Shard a part of a hybrid model; see `lora_suite.train.backends.dtensor.parallel.shard`.

    Experts that are split over ranks are sharded over those that hold the same. Routers stay whole and in
    float32, because rounding them would route rows elsewhere.
    """
    whole = ignored | {parameter for router in routers(module) for parameter in router.parameters()}
    topology = layout.topology
    for _, experts in expert_modules(module) if topology.ep.size > 1 else ():
        if isinstance(experts, FSDPModule):
            continue  # the whole model comes last, after its layers
        if topology.same_experts.size > 1 or masters:
            shard(experts, layout.expert_mesh, layout.expert_shards.size, masters, whole)
        else:
            whole |= {getattr(experts, stack) for stack in STACKS}
    shard(module, layout.fsdp_mesh, layout.shards.size, masters, whole)
