# SPDX-License-Identifier: Apache-2.0
"""Layouts: the mesh of ranks, tensor parallelism inside a layer, FSDP2 around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter import Placement
from lora_suite.train.topology import Axis, Topology

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HYBRID = "nemotron_h"
FAMILIES = ("llama", "qwen2", "qwen3", HYBRID)
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
PER_HEAD_NORMS = ("q_norm", "k_norm")


def build_mesh(device: torch.device, tp_size: int) -> tuple[DeviceMesh, Topology]:
    """Mesh (dp, tp) over all ranks, neighbours in tp, and this rank's place in it."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    dp, tp = (_axis(mesh, name) for name in ("dp", "tp"))
    return mesh, Topology(dist.get_rank(), world, device, dp, tp, pp=Axis(0, 1))


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    return Axis(mesh.get_local_rank(name), mesh[name].size(), mesh.get_group(name))


@dataclass(frozen=True)
class Layout:
    """Where ranks stand. topology: axes dp and tp. shards: the part of dp over which weights are sharded.

    fsdp_mesh: what FSDP2 takes: (shard,), or (replicate, shard) where dp is more than its shards. tp_mesh:
    (tp,). expert_shards, expert_mesh: the same for stacks of experts that are split over the topology's ep.
    """

    topology: Topology
    shards: Axis
    fsdp_mesh: DeviceMesh
    tp_mesh: DeviceMesh
    expert_shards: Axis
    expert_mesh: DeviceMesh


def build_layout(device: torch.device, tp_size: int, replicas: int, ep_size: int = 1) -> Layout:
    """Lay all ranks out as (dp, tp), neighbours in tp, dp in turn as (replicas, shards).

    replicas: how often a model copy's weights are held over dp. 1: sharded over all of dp; more is HSDP.
    ep_size: over how many neighbours in dp experts are split, without tensor parallelism. What a rank keeps
    of them is sharded over all ranks that hold the same, unless nothing is sharded over dp.
    """
    flat, topology = build_mesh(device, tp_size)
    if replicas == 1:
        layout = Layout(topology, topology.dp, flat["dp"], flat["tp"], topology.dp, flat["dp"])
    else:
        sizes = (replicas, topology.dp.size // replicas, tp_size)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
        topology = replace(topology, dp_replicas=replicas)
        shards, fsdp_mesh = _axis(mesh, "shard"), mesh["replicate", "shard"]
        layout = Layout(topology, shards, fsdp_mesh, mesh["tp"], shards, fsdp_mesh)
    if ep_size == 1:
        return layout
    same = topology.dp.size // ep_size
    copies = same if layout.shards.size == 1 else 1
    names = ("replicate", "shard", "ep")
    experts = init_device_mesh(device.type, (copies, same // copies, ep_size), mesh_dim_names=names)
    edp = _axis(experts, "replicate" if copies > 1 else "shard")
    return replace(
        layout,
        topology=replace(topology, ep=_axis(experts, "ep"), edp=edp),
        expert_shards=_axis(experts, "shard"),
        expert_mesh=experts["replicate", "shard"] if copies > 1 else experts["shard"],
    )


def decoder_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers of a model, by full name."""
    for index, layer in enumerate(cast(nn.ModuleList, model.get_submodule("model.layers"))):
        yield f"model.layers.{index}", layer


def placement_of(linear_name: str) -> Placement:
    """How the plan splits a linear of that (full or last) name; "none": the head and whatever it leaves."""
    leaf = linear_name.rpartition(".")[2]
    if leaf in COLUMN:
        return "column"
    return "row" if leaf in ROW else "none"


def check_family(model_type: str) -> None:
    """Raise ConfigError for a model type whose layers this backend does not know how to split and shard."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"policy.model_name: the dtensor backend trains {', '.join(FAMILIES)} models, not {model_type}; "
            f"name another model"
        )


def split_layers(model: PreTrainedModel, tp_mesh: DeviceMesh) -> None:
    """Split attention and MLP of every layer over the tp ranks; embedding, norms and head are replicated."""
    for _, layer in decoder_layers(model):
        parallelize_module(layer, tp_mesh, _layer_plan(layer))


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Styles of one layer's modules.

    Block inputs become replicated DTensors, so that the input gradients of q, k, v (gate, up) are summed
    while they are partial, and reduced once.
    """
    replicated = Replicate()
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": replicated},
            desired_input_kwarg_layouts={"hidden_states": replicated},
        ),
        "mlp": PrepareModuleInput(input_layouts=(replicated,), desired_input_layouts=(replicated,)),
    }
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            plan[name] = ColwiseParallel() if placement_of(name) == "column" else RowwiseParallel()
    return plan


def is_tp_shard(parameter: nn.Parameter) -> bool:
    """Whether the tp ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return any(name == "tp" and placement.is_shard() for name, placement in axes)


def has_partial_gradient(parameter_name: str) -> bool:
    """Whether a tp rank's gradient of a replicated parameter is part of a sum: norms of split heads."""
    return any(f".{norm}." in parameter_name for norm in PER_HEAD_NORMS)


def shard(
    module: nn.Module, mesh: DeviceMesh, shards: int, masters: bool, ignored: set[nn.Parameter]
) -> None:
    """Shard a module's parameters with FSDP2; gradients are summed over all ranks of the mesh, not averaged.

    shards: the size of the mesh's last axis. masters: the parameters are float32 masters of a bfloat16
    training: gathered and multiplied in bfloat16, gradients summed in float32. ignored: parameters that stay
    as they are (adapters).
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if masters else MixedPrecisionPolicy()
    # One rank has nothing to gather again in the backward pass.
    again = shards > 1
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=again,
        ignored_params=ignored,
    )
    # The loss is already divided by the global batch's tokens: https://github.com/NVIDIA-NeMo/RL/pull/1693.
    # A plain sum, because gloo knows no scaled one, which is what FSDP2 asks for otherwise.
    wrapped = cast(FSDPModule, module)
    wrapped.set_force_sum_reduction_for_comms(True)
    wrapped.set_gradient_divide_factor(1.0)


def prefetch_layers(model: PreTrainedModel) -> None:
    """Gather each sharded layer while the one before it computes, and what is sharded in it by itself.

    Forward, FSDP2 asks for a layer's weights only when the host gets there, which is too late where a step
    waits for the host. Backward it looks ahead by itself, in the reverse order of what has run.
    """
    for (_, one), (_, following) in pairwise(decoder_layers(model)):
        parts: list[FSDPModule] = [each for each in following.modules() if isinstance(each, FSDPModule)]
        cast(FSDPModule, one).set_modules_to_forward_prefetch(parts)
