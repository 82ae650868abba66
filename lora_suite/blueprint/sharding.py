# SPDX-License-Identifier: Apache-2.0
"""How the dtensor backend holds weights over data parallel ranks: no more sharded than memory demands.

Every doubling of the shards beyond what fits costs communication and gains nothing for frozen weights, which
no gradient is reduced for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.layout import RankLayout, Sharding, rank_layout
from lora_suite.blueprint.memory import MemoryEstimate, estimate_memory
from lora_suite.config.schema import Recipe


@dataclass(frozen=True)
class MemoryPlan:
    """A layout, and what a rank is expected to need in it (None where the model's shape is not known).

    memory: bytes of the GPU, None without one.
    """

    layout: RankLayout
    estimate: MemoryEstimate | None
    memory: int | None

    @property
    def sharding(self) -> Sharding:
        """How weights are held over data parallel ranks."""
        return self.layout.sharding

    @property
    def too_large(self) -> bool:
        """Whether the training is not expected to fit."""
        if self.estimate is None or self.memory is None:
            return False
        return not self.estimate.fits(self.memory)

    def __str__(self) -> str:
        layout = self.layout
        held = f"sharded over {layout.shards} ranks" if layout.shards > 1 else "held whole"
        copies = f", {layout.replicas} times" if layout.replicas > 1 else ""
        split = f", experts split over {layout.expert}" if layout.expert > 1 else ""
        text = f"weights {held}{copies} ({self.sharding}){split}"
        if self.estimate is None:
            return text
        of = f" of {self.memory / 2**30:.0f} GiB" if self.memory is not None else ""
        return f"{text}; the memory model expects {self.estimate}{of} a rank"


def plan_memory(recipe: Recipe, blueprint: Blueprint, memory: int | None, fast: bool) -> MemoryPlan:
    """Choose the layout of a recipe: what it names, or of `sharding: auto` the least sharded that fits.

    memory: bytes of the GPU. Without a GPU, or without the model's shape, `auto` shards over all ranks. fast:
    by the fast path, which holds weights whole. Megatron's layout is the recipe's.
    """
    if fast or recipe.policy.backend == "megatron":
        return _plan(recipe, blueprint, recipe.data_parallel_size, memory, fast)
    plans = [_plan(recipe, blueprint, replicas, memory, fast) for replicas in _allowed(recipe)]
    known = memory is not None and blueprint.model is not None
    return next((plan for plan in plans if known and not plan.too_large), plans[-1])


def named_sharding(recipe: Recipe) -> str | None:
    """The key by which a recipe asks for weights that are sharded over its ranks; None if it does not."""
    dtensor, data = recipe.policy.dtensor_cfg, recipe.data_parallel_size
    if data == 1:
        return None
    if dtensor.dp_replicate_size not in (None, data):
        return f"policy.dtensor_cfg.dp_replicate_size is {dtensor.dp_replicate_size}"
    if dtensor.sharding in ("hsdp", "fsdp"):
        return f"policy.dtensor_cfg.sharding is {dtensor.sharding}"
    return None


def _plan(recipe: Recipe, blueprint: Blueprint, replicas: int, memory: int | None, fast: bool) -> MemoryPlan:
    layout = rank_layout(recipe, replicas)
    known = blueprint.model is not None
    estimate = estimate_memory(recipe, blueprint, layout, fast) if known else None
    return MemoryPlan(layout, estimate, memory)


def _allowed(recipe: Recipe) -> Sequence[int]:
    """How often weights may be held by the recipe's keys, the most first."""
    dtensor, data = recipe.policy.dtensor_cfg, recipe.data_parallel_size
    if dtensor.dp_replicate_size is not None:
        return [dtensor.dp_replicate_size]
    replicas = [count for count in range(data, 0, -1) if data % count == 0]
    return {
        "auto": replicas,
        "replicate": replicas[:1],
        "hsdp": replicas[1:-1],
        "fsdp": replicas[-1:],
    }[dtensor.sharding]
