# SPDX-License-Identifier: Apache-2.0
"""The name of a recipe, checked against what the recipe resolves to.

    sft-<model>-<N>n<G>g-<backend and layout>[-lora][-modifiers]

N nodes with G GPUs each (``c`` in place of ``g`` counts CPU processes). Backend and layout: ``fsdp2`` or
``megatron``, then the sizes of parallel dimensions, ``tp2``, ``pp2``, ``cp2``, ``ep2`` or ``sp`` (sequence
parallel), with or without dashes. A dimension that is not named has size 1. ``-lora`` is there exactly if
LoRA is on. Case does not matter.
"""

from __future__ import annotations

import re

from lora_suite.config.errors import ConfigError
from lora_suite.config.schema import Recipe

_LAYOUT = r"(?:-?(?:(?:tp|pp|cp|ep)\d+|sp(?![a-z0-9.])))*"
_STEM = re.compile(
    r"sft-(?P<model>[a-z0-9.]+(?:-[a-z0-9.]+)*?)-(?P<nodes>\d+)n(?P<processes>\d+)[gc]"
    rf"-(?P<backend>fsdp2|megatron)(?P<layout>{_LAYOUT})(?P<modifiers>(?:-[a-z0-9.]+)*)"
)
_DIMENSION = re.compile(r"(tp|pp|cp|ep)(\d+)")
_GRAMMAR = "sft-<model>-<N>n<G>g-<fsdp2|megatron>[tp2…][-lora][-modifiers]"


def check_stem(stem: str, recipe: Recipe) -> None:
    """Raise ConfigError, listing every disagreement, if a recipe's file name is not what it resolves to."""
    match = _STEM.fullmatch(stem.lower())
    if match is None:
        raise ConfigError(f"{stem}: the name does not follow {_GRAMMAR}")
    problems = [
        f"it says {said} {what}, but {key} is {is_}"
        for what, key, said, is_ in _statements(match, recipe)
        if said != is_
    ]
    lora_named = "lora" in match["modifiers"].split("-")
    if lora_named != recipe.policy.lora.enabled:
        key = f"policy.{recipe.policy.backend}_cfg.lora_cfg.enabled"
        value = str(recipe.policy.lora.enabled).lower()
        problems.append(f"it {'has' if lora_named else 'lacks'} -lora, but {key} is {value}")
    if "sp" in match["layout"] and not _sequence_parallel(recipe):
        problems.append("it says sp, but sequence_parallel is off")
    if problems:
        raise ConfigError(f"{stem}: the name does not fit the recipe: {'; '.join(problems)}")


def _statements(match: re.Match[str], recipe: Recipe) -> list[tuple[str, str, object, object]]:
    """Return (what, key, value in the name, value in the recipe) for everything the name states."""
    policy, dims = recipe.policy, dict(_DIMENSION.findall(match["layout"]))
    stated = {name: int(dims.get(name, 1)) for name in ("tp", "pp", "cp", "ep")}
    statements: list[tuple[str, str, object, object]] = [
        ("nodes", "cluster.num_nodes", int(match["nodes"]), recipe.cluster.num_nodes),
        ("processes a node", "cluster.gpus_per_node", int(match["processes"]), recipe.cluster.gpus_per_node),
        ("as backend", "the enabled backend", match["backend"], _backend_name(recipe)),
    ]
    if policy.backend == "dtensor":
        block, sizes = policy.dtensor_cfg, {"tp": "tensor_parallel_size", "cp": "context_parallel_size"}
        return statements + [
            (f"as {name} size", f"policy.dtensor_cfg.{sizes[name]}", size, getattr(block, sizes[name]))
            if name in sizes
            else (f"as {name} size", f"that of the dtensor backend ({name})", size, 1)
            for name, size in stated.items()
        ]
    megatron = policy.megatron_cfg
    keys = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    return statements + [
        (f"as {name} size", f"policy.megatron_cfg.{keys[name]}", size, getattr(megatron, keys[name]))
        for name, size in stated.items()
    ]


def _backend_name(recipe: Recipe) -> str:
    """Return the backend's word in a name."""
    return "fsdp2" if recipe.policy.backend == "dtensor" else "megatron"


def _sequence_parallel(recipe: Recipe) -> bool:
    """Whether the enabled backend splits activations along the sequence."""
    policy = recipe.policy
    block = policy.dtensor_cfg if policy.backend == "dtensor" else policy.megatron_cfg
    return block.sequence_parallel
