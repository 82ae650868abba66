# SPDX-License-Identifier: Apache-2.0
"""How the parts of a model and its data lie on the ranks of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lora_suite.config.schema import Recipe

Sharding = Literal["replicate", "hsdp", "fsdp"]

COLUMN = ("q", "k", "v", "gate", "up", "linear_qkv", "linear_fc1")
"""Kinds of linears that tensor parallelism splits by output."""
ROW = ("o", "down", "linear_proj", "linear_fc2")
"""Those that it splits by input."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks of a training, neighbours in tensor first, then in data, then in pipeline.

    tensor, pipeline, expert: parallel sizes (experts are split over ranks of `data`). data: ranks that see
    different rows. replicas: how often a model copy's weights are held over these. gpus_per_node: ranks that
    share a node.
    """

    tensor: int
    pipeline: int
    expert: int
    data: int
    replicas: int
    gpus_per_node: int

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def shards(self) -> int:
        """Ranks over which a model copy's weights are sharded."""
        return self.data // self.replicas

    @property
    def expert_shards(self) -> int:
        """Ranks over which routed experts are sharded: where they are split, all those that have the same."""
        if self.expert == 1 or self.shards == 1:
            return self.shards
        return self.data // self.expert

    @property
    def sharding(self) -> Sharding:
        """The name of how weights are held over data parallel ranks."""
        if self.shards == 1:
            return "replicate"
        return "fsdp" if self.replicas == 1 else "hsdp"

    def per_node(self, stride: int, size: int) -> int:
        """Members of one group that share a node; the group's neighbours are `stride` ranks apart."""
        return max(1, min(size, self.gpus_per_node // stride))


def rank_layout(recipe: Recipe, replicas: int) -> RankLayout:
    """The layout of a recipe whose weights are held `replicas` times over its data parallel ranks.

    Megatron replicates them whatever `replicas` says; it can only shard its optimizer.
    """
    policy, data = recipe.policy, recipe.data_parallel_size
    megatron, dtensor = policy.megatron_cfg, policy.dtensor_cfg
    if policy.backend == "megatron":
        return RankLayout(
            tensor=megatron.tensor_model_parallel_size,
            pipeline=megatron.pipeline_model_parallel_size,
            expert=megatron.expert_model_parallel_size,
            data=data,
            replicas=data,
            gpus_per_node=recipe.cluster.gpus_per_node,
        )
    return RankLayout(
        tensor=dtensor.tensor_parallel_size,
        pipeline=1,
        expert=dtensor.expert_parallel_size,
        data=data,
        replicas=replicas,
        gpus_per_node=recipe.cluster.gpus_per_node,
    )
