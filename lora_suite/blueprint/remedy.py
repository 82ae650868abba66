# SPDX-License-Identifier: Apache-2.0
"""Which key of a recipe to change so that its training needs less memory, by the memory model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.memory import HEADROOM, mlps_in_one, unit_of
from lora_suite.blueprint.sharding import MemoryPlan, plan_memory
from lora_suite.config.schema import Block, Recipe

_WORTH_IT = 0.9
"""Share of what was needed that a change must bring it down to; what failed needed more than was there."""

B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class Change:
    """One key with the value that it should get, and what a rank is expected to need then, in bytes."""

    key: str
    value: str
    total: int

    def __str__(self) -> str:
        size, unit = unit_of(self.total)
        return f"set {self.key}={self.value} (then {self.total / size:.1f} {unit} by the model)"


def remedy(recipe: Recipe, blueprint: Blueprint, plan: MemoryPlan, fast: bool) -> Change | None:
    """The first change that makes the training fit, or the one that saves most; None if none saves a tenth.

    plan, fast: of the training that ran out of memory. What costs least speed is tried first: smaller micro
    batches, more shards, recomputation in part and then of all, more tensor parallel ranks, shorter rows.
    """
    if plan.estimate is None:
        return None
    enough = _WORTH_IT * plan.estimate.total
    changes = [
        change
        for changed, key, value, stays_fast in _candidates(recipe, blueprint, plan)
        if (change := _change(changed, blueprint, plan, key, value, fast and stays_fast)).total <= enough
    ]
    room = HEADROOM * plan.memory if plan.memory is not None else 0.0
    fitting = (change for change in changes if change.total <= room)
    return next(fitting, min(changes, key=lambda change: change.total, default=None))


def _change(
    changed: Recipe, blueprint: Blueprint, plan: MemoryPlan, key: str, value: str, fast: bool
) -> Change:
    estimate = plan_memory(changed, blueprint, plan.memory, fast).estimate
    assert estimate is not None, "the shape is known"
    return Change(key, value, estimate.total)


def _candidates(
    recipe: Recipe, blueprint: Blueprint, plan: MemoryPlan
) -> Iterator[tuple[Recipe, str, str, bool]]:
    """Changed recipes, each with the key, its value, and whether it still takes the fast path."""
    policy, backend = recipe.policy, f"policy.{recipe.policy.backend}_cfg"
    micro = policy.train_micro_batch_size
    for size in range(micro - 1, 0, -1):
        if micro % size == 0:
            yield *_with(recipe, "policy.train_micro_batch_size", size), True
    dtensor = policy.backend == "dtensor"
    if dtensor and plan.sharding != "fsdp" and recipe.data_parallel_size > 1:
        whole = _with(recipe, f"{backend}.dp_replicate_size", None)[0]
        yield *_with(whole, f"{backend}.sharding", "fsdp"), False
    block = policy.dtensor_cfg if dtensor else policy.megatron_cfg
    if dtensor and not block.activation_checkpointing and not _routed(blueprint):
        yield *_with(recipe, f"{backend}.activation_checkpointing", "selective"), _selects(recipe)
    if dtensor and block.activation_checkpointing == "selective":
        yield from _more_anew(recipe, blueprint)
    if block.activation_checkpointing is not True:
        yield *_with(recipe, f"{backend}.activation_checkpointing", True), False
    tensor = 2 * plan.layout.tensor
    if _splits(recipe, blueprint, tensor) and recipe.data_parallel_size % 2 == 0:
        name = "tensor_parallel_size" if dtensor else "tensor_model_parallel_size"
        yield *_with(recipe, f"{backend}.{name}", tensor), True
    length = policy.max_total_sequence_length // 2
    if length and length % policy.make_sequence_length_divisible_by == 0:
        yield *_with(recipe, "policy.max_total_sequence_length", length), True


def _more_anew(recipe: Recipe, blueprint: Blueprint) -> Iterator[tuple[Recipe, str, str, bool]]:
    """Gate and up made anew in ever more layers."""
    layers = blueprint.model.layers if blueprint.model is not None else 0
    fast = _selects(recipe) and mlps_in_one(blueprint)
    for count in range(recipe.policy.dtensor_cfg.recompute_mlp_layers + 1, layers + 1):
        yield *_with(recipe, "policy.dtensor_cfg.recompute_mlp_layers", count), fast


def _routed(blueprint: Blueprint) -> bool:
    return blueprint.model is None or blueprint.model.hybrid is not None


def _selects(recipe: Recipe) -> bool:
    """Whether the fast path recomputes in part: not in PEFT's layers, nor in float64."""
    lora = recipe.policy.dtensor_cfg.lora_cfg
    theirs = lora.enabled and lora.implementation == "peft"
    return not theirs and recipe.policy.precision != "float64"


def _splits(recipe: Recipe, blueprint: Blueprint, tensor: int) -> bool:
    """Whether so many tensor parallel ranks may share the model: not experts, Mamba mixers, PEFT's layers."""
    model, policy = blueprint.model, recipe.policy
    if model is None or model.hybrid is not None or model.moe is not None:
        return False
    if (
        policy.backend == "dtensor"
        and policy.lora.enabled
        and policy.dtensor_cfg.lora_cfg.implementation == "peft"
    ):
        return False
    sizes = (model.heads, model.kv_heads, model.hidden, model.intermediate, model.vocab)
    return not any(size % tensor for size in sizes)


def _with(recipe: Recipe, key: str, value: object) -> tuple[Recipe, str, str]:
    """A recipe with one key set, the key, and the value as an override writes it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _set(recipe, key.split("."), value), key, text


def _set(block: B, path: list[str], value: object) -> B:
    name, *rest = path
    return block.model_copy(update={name: _set(getattr(block, name), rest, value) if rest else value})
