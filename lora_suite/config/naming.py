# SPDX-License-Identifier: Apache-2.0
"""The name of a recipe, checked against what the recipe resolves to.

    sft-<model>-<N>n<G>g-<backend and layout>[-lora][-modifiers]

N nodes with G GPUs each (``c`` in place of ``g`` counts CPU processes). Backend and layout: ``fsdp2`` or
``megatron``, then the sizes of parallel dimensions, ``tp2``, ``pp2``, ``cp2``, ``ep2`` or ``sp`` (sequence
parallel), with or without dashes. A dimension that is not named has size 1; ``ep`` of ``fsdp2`` alone need
not be named, because it lays out the data parallel ranks. ``-lora`` is there exactly if LoRA is on. Case does
not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lora_suite.config.errors import ConfigError
from lora_suite.config.schema import Recipe

_LAYOUT = r"(?:-?(?:(?:tp|pp|cp|ep)\d+|sp(?![a-z0-9.])))*"
_STEM = re.compile(
    r"sft-(?P<model>[a-z0-9.]+(?:-[a-z0-9.]+)*?)-(?P<nodes>\d+)n(?P<processes>\d+)[gc]"
    rf"-(?P<backend>fsdp2|megatron)(?P<layout>{_LAYOUT})(?P<modifiers>(?:-[a-z0-9.]+)*)"
)
_DIMENSION = re.compile(r"(tp|pp|cp|ep)(\d+)")
_SIZES = {
    "fsdp2": {"tp": "tensor_parallel_size", "cp": "context_parallel_size"},
    "megatron": {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    },
}
_GRAMMAR = "sft-<model>-<N>n<G>g-<fsdp2|megatron>[tp2…][-lora][-modifiers]"


def check_stem(stem: str, recipe: Recipe) -> None:
    """Raise ConfigError, listing every disagreement, if a recipe's file name is not what it resolves to."""
    match = _STEM.fullmatch(stem.lower())
    if match is None:
        raise ConfigError(f"{stem}: the name does not follow {_GRAMMAR}")
    problems = [
        f"it says {what.format(said)}, but {key} is {is_}"
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


def counts_cpu_processes(stem: str) -> bool:
    """Whether a name says that its case runs on CPU processes; a name outside the grammar says nothing."""
    return re.search(r"-\d+n\d+c-", stem.lower()) is not None


def _statements(match: re.Match[str], recipe: Recipe) -> Iterator[tuple[str, str, object, object]]:
    """Yield (what, key, value in the name, value in the recipe) for everything the name states."""
    cluster, policy = recipe.cluster, recipe.policy
    yield "{} nodes", "cluster.num_nodes", int(match["nodes"]), cluster.num_nodes
    yield "{} processes a node", "cluster.gpus_per_node", int(match["processes"]), cluster.gpus_per_node
    backend = "fsdp2" if policy.backend == "dtensor" else "megatron"
    yield "backend {}", "the enabled backend", match["backend"], backend
    block = policy.dtensor_cfg if policy.backend == "dtensor" else policy.megatron_cfg
    stated = dict(_DIMENSION.findall(match["layout"]))
    for name, size_key in _SIZES[backend].items():
        said = int(stated.pop(name, 1))
        yield f"{name} {{}}", f"policy.{policy.backend}_cfg.{size_key}", said, getattr(block, size_key)
    if backend == "fsdp2" and "ep" in stated:
        key, size = "policy.dtensor_cfg.expert_parallel_size", policy.dtensor_cfg.expert_parallel_size
        yield "ep {}", key, int(stated.pop("ep")), size
    for name, said in stated.items():
        yield f"{name} {{}}", f"{name} of the {policy.backend} backend", int(said), 1


def _sequence_parallel(recipe: Recipe) -> bool:
    """Whether the enabled backend splits activations along the sequence."""
    policy = recipe.policy
    block = policy.dtensor_cfg if policy.backend == "dtensor" else policy.megatron_cfg
    return block.sequence_parallel
