# SPDX-License-Identifier: Apache-2.0
"""Seconds that no implementation of a training step can beat, and what they are bound by.

A step is its passes, forward and backward over every micro batch, and then the update of what trains, which
waits for the norm of all gradients. In the passes arithmetic, memory traffic and communication may overlap
perfectly, so the slowest of them counts:

    floor = max(arithmetic, memory, communication) + update

arithmetic: `Blueprint.flops_per_token` at the GPU's peak.

memory: of each micro batch, every weight of the rank is read forward and again backward (not below the lowest
adapter, through which nothing flows back); full SFT writes its gradients; what is kept of the activations is
written and read once. Of E routed experts of which a token meets k, T tokens that are routed evenly touch
E·(1 - (1 - k/E)^T), and only these are read.

communication: what a rank receives, each message at the speed of its slowest way. Over g ranks a
reduce-scatter or all-gather of S bytes brings S·(g-1)/g, an all-reduce twice that, an all-to-all the same of
what a rank sends. Sharded weights are gathered for each direction of a micro batch, gradients of full SFT
reduced once a step. Tensor parallelism sums a layer's states twice a direction. Expert parallelism sends each
token in each direction to the ranks that have one of its experts, once to each, and gets a row back: of g
ranks with E/g experts each to g·(1 - C(E - E/g, k) / C(E, k)) where tokens are routed evenly. Replicas of
trained weights share the update (ZeRO, arXiv 1910.02054): gradients are reduced to parts, weights gathered.
With LoRA no gradient of a frozen weight crosses ranks; adapters' are summed.

update: of full SFT in bfloat16 26 bytes a parameter cross memory: the gradient (2) is read, master (4) and
moments (4 + 4) are read and written; the weight is its master's upper half. Data parallel ranks share that.
Of LoRA the same of the adapters alone, on every rank.

Left out: recomputation, bubbles of a pipeline, norms' and attention's own traffic, the optimizer's sums over
ranks, launches. Sources: the ring algorithms' costs are Thakur, Rabenseifner and Gropp, Optimization of
collective communication operations in MPICH (2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Literal

from lora_suite.blueprint.activations import Keeping, kept_by_layer
from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.hardware import Gpu
from lora_suite.blueprint.layout import COLUMN, ROW, RankLayout
from lora_suite.blueprint.linears import Linear
from lora_suite.blueprint.memory import (
    WIDTHS,
    LocalParams,
    expert_adapter_params,
    local_adapter_params,
    micro_batch_tokens,
    micro_batches,
    moment_bytes,
    trains,
)
from lora_suite.config.schema import Recipe

Term = Literal["arithmetic", "memory", "communication", "update"]


@dataclass(frozen=True)
class Floor:
    """Seconds of a step's terms; see the module."""

    arithmetic: float
    memory: float
    communication: float
    update: float

    @property
    def seconds(self) -> float:
        """The floor."""
        return max(self.arithmetic, self.memory, self.communication) + self.update

    @property
    def bound_by(self) -> Term:
        """The largest term."""
        terms: dict[Term, float] = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "communication": self.communication,
            "update": self.update,
        }
        return max(terms, key=lambda term: terms[term])


@dataclass(frozen=True)
class StepFloor:
    """The floor of a recipe's steps on one kind of GPU; needs a blueprint that knows the model's shape."""

    recipe: Recipe
    blueprint: Blueprint
    layout: RankLayout
    gpu: Gpu

    def of(self, slots: int) -> Floor:
        """The floor of a step with that many token slots over all ranks."""
        passes = self._micro_batches(slots)
        tokens = slots / (self.layout.data * passes)
        operations = slots * self.blueprint.flops_per_token("full" if self._full else "lora")
        return Floor(
            arithmetic=operations / (self.layout.world * self.gpu.flops),
            memory=passes * self._traffic(tokens) / self.gpu.memory,
            communication=passes * self._in_pass(tokens) + self._once,
            update=self._update / self.gpu.memory,
        )

    def _micro_batches(self, slots: int) -> float:
        """Micro batches of a rank: as the recipe says, or as many as packed rows fill."""
        if not self.recipe.policy.sequence_packing.enabled:
            return micro_batches(self.recipe)
        return max(1.0, slots / (self.layout.data * micro_batch_tokens(self.recipe)))

    # -- memory ---------------------------------------------------------------------------------------------

    def _traffic(self, tokens: float) -> float:
        """Bytes of weights, gradients and activations that cross memory in a micro batch."""
        lowest = min((site.layer for site in self.blueprint.adapters if site.layer is not None), default=None)
        moved = 0.0
        for linear in self.blueprint.linears:
            touched = self._local(linear) * _touched(linear, tokens * self.layout.expert)
            below = linear.layer is not None and (lowest is None or linear.layer < lowest)
            moved += touched * (3 if self._full else 1 if below else 2)
        return self._width * moved + 2 * tokens * self._kept

    def _local(self, linear: Linear) -> float:
        """Parameters of a linear that a rank multiplies with."""
        layout = self.layout
        if linear.kind == "head":
            return linear.params / layout.tensor  # of a pipeline the last stage has it
        if linear.kind == "experts":
            return linear.params / (layout.expert * layout.pipeline)
        split = layout.tensor if linear.kind in (*COLUMN, *ROW) else 1
        return linear.params / (split * layout.pipeline)

    @cached_property
    def _kept(self) -> float:
        """Bytes of activations that are kept a token, at the least."""
        keeping = Keeping(
            width=self._width,
            lean=True,
            full=self._full,
            needs_input=trains(self.blueprint),
            tensor=self.layout.tensor,
            sequence=True,
        )
        model = self.blueprint.model
        assert model is not None
        return sum(kept_by_layer(model, self.blueprint.linears, keeping)) / self.layout.pipeline

    @property
    def _full(self) -> bool:
        return self.blueprint.rank is None

    @property
    def _width(self) -> int:
        return WIDTHS[self.recipe.policy.precision]

    @cached_property
    def _params(self) -> LocalParams:
        return LocalParams.of(self.blueprint, self.layout, splits_ends=True)

    @cached_property
    def _update(self) -> float:
        """Bytes that the optimizer moves: the gradient is read, master and moments are read and written."""
        each = self._width + 2 * (max(4, self._width) + moment_bytes(self.recipe))
        if not self._full:
            return each * local_adapter_params(self.blueprint, self.layout)
        held, layout = self._params, self.layout
        return each * ((held.layers + held.ends) / layout.data + held.experts * layout.expert / layout.data)

    # -- communication --------------------------------------------------------------------------------------

    def _in_pass(self, tokens: float) -> float:
        """Seconds of a micro batch's communication."""
        layout, model = self.layout, self.blueprint.model
        assert model is not None
        states = tokens * model.hidden * self._width
        split_layers = _split_blocks(self.blueprint) / layout.pipeline
        # An all-reduce of each block's states forward, of their gradient backward.
        tensor = 2 * split_layers * 2 * self._gather(states, 1, layout.tensor)
        gathered = self._params.layers + self._params.ends
        experts = self._params.experts
        stride = layout.tensor
        weights = 2 * self._gather(self._width * gathered, stride, layout.shards)
        weights += 2 * self._gather(self._width * experts, stride * layout.expert, layout.expert_shards)
        # Out and back, forward and backward.
        sent = states * _ranks_met(self.blueprint, layout.expert) / layout.pipeline
        return tensor + weights + 4 * self._all_to_all(sent, stride, layout.expert)

    @cached_property
    def _once(self) -> float:
        """Seconds of what crosses ranks once a step: the sums of what trains, in float32."""
        layout, wide = self.layout, max(4, self._width)
        stride = layout.tensor
        if not self._full:
            of_experts = expert_adapter_params(self.blueprint, layout)
            of_all = local_adapter_params(self.blueprint, layout) - of_experts
            same = layout.data // layout.expert
            return (
                2
                * wide
                * (
                    self._gather(of_all, stride, layout.data)
                    + self._gather(of_experts, stride * layout.expert, same)
                )
            )
        ends, experts = self._params.layers + self._params.ends, self._params.experts
        apart = stride * layout.expert
        same = layout.data // layout.expert
        return self._train(ends, stride, layout.shards, layout.replicas) + self._train(
            experts, apart, layout.expert_shards, same // layout.expert_shards
        )

    def _train(self, params: float, stride: int, shards: int, replicas: int) -> float:
        """Seconds to reduce gradients over shards, and to share the update among replicas and gather it."""
        wide = max(4, self._width)
        reduced = self._gather(wide * params, stride, shards)
        shared = self._gather((wide + self._width) * params / shards, stride * shards, replicas)
        return reduced + shared

    def _gather(self, size: float, stride: int, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes; members are `stride` ranks apart.

        Over several nodes each node receives what the others have, through all its members' adapters.
        """
        near = self.layout.per_node(stride, ranks)
        nodes = -(-ranks // near)
        linked = size * (ranks - 1) / ranks / self.gpu.link if near > 1 else 0.0
        return max(linked, size * (nodes - 1) / nodes / near / self.gpu.network)

    def _all_to_all(self, size: float, stride: int, ranks: int) -> float:
        """Seconds in which a rank sends `size` bytes in equal parts to every member of its group."""
        near = self.layout.per_node(stride, ranks)
        linked = size * (near - 1) / ranks / self.gpu.link
        return max(linked, size * (ranks - near) / ranks / self.gpu.network)


def _touched(linear: Linear, tokens: float) -> float:
    """Share of a stack of experts that tokens touch which are routed evenly; 1 of a plain linear."""
    return 1.0 - (1.0 - linear.active / linear.count) ** tokens if linear.active < linear.count else 1.0


def _split_blocks(blueprint: Blueprint) -> int:
    """Blocks whose output tensor parallelism sums: attention and MLP of every layer."""
    return sum(linear.kind in ("o", "down") for linear in blueprint.linears)


def _ranks_met(blueprint: Blueprint, ranks: int) -> float:
    """Ranks that have one of a token's experts where it is routed evenly, over all layers."""
    return sum(
        ranks
        * (
            1.0
            - comb(linear.count - linear.count // ranks, linear.active) / comb(linear.count, linear.active)
        )
        for linear in blueprint.linears
        if linear.kind == "experts" and linear.name.endswith("down_proj")
    )
