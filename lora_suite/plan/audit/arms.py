# SPDX-License-Identifier: Apache-2.0
"""Scripts that look like the two arms of a pair, and what else than LoRA they differ in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lora_suite.plan.audit.finding import AuditFinding
from lora_suite.plan.audit.names import ScriptName, parse_name
from lora_suite.plan.audit.repository import Repository
from lora_suite.plan.comparability import compare_arms
from lora_suite.plan.external.script import DEFAULT_GPUS_PER_NODE, Script

# Names and places, and what the CONFIG block says. Whether checkpoints are written is part of a step's time.
_ALLOWED = ("logger", "cluster.num_nodes", "cluster.gpus_per_node", "sft.max_num_steps")
_SHOWN = 4


def incomparable_arms(repository: Repository) -> Iterator[AuditFinding]:
    """Yield each LoRA script whose full-SFT twin is another training.

    The twin has the same name without ``-lora``; without such a script it is the one of the same algorithm,
    model and backend that shares most words of the name.
    """
    named = [(parse_name(script.name), script) for script in repository.scripts]
    full = [(name, script) for name, script in named if name is not None and not name.lora]
    for name, script in named:
        twin = _twin(name, full) if name is not None and name.lora else None
        if twin is None:
            continue
        differing = _differences(repository, script, twin)
        if differing:
            keys = ", ".join(key for key, _, _ in differing)
            lines = tuple(f"{key}: {ours!r} and {theirs!r}" for key, ours, theirs in differing)
            rest = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            message = f"against {twin.name} it differs in {'; '.join(lines[:_SHOWN])}{rest}"
            file = repository.shown(script.path)
            yield AuditFinding("incomparable-arms", file, 0, f"{twin.name}: {keys}", message, lines)


def _twin(name: ScriptName, full: Sequence[tuple[ScriptName, Script]]) -> Script | None:
    """The script without LoRA that a LoRA script would be held against."""
    family = [
        (other, script)
        for other, script in full
        if (other.family, other.backend) == (name.family, name.backend)
    ]
    if not family:
        return None
    return min(family, key=lambda each: (_distance(name, each[0]), each[1].name))[1]


def _distance(one: ScriptName, other: ScriptName) -> int:
    """In how many words two names differ, sizes included."""
    sizes = (one.nodes != other.nodes) + (one.gpus != other.gpus)
    return sizes + len(set(one.strategy) ^ set(other.strategy))


def _differences(repository: Repository, lora: Script, full: Script) -> list[tuple[str, object, object]]:
    """Key, value in the LoRA script and value in the other, of the CONFIG blocks and then of the recipes."""
    ours, theirs = _declared(lora), _declared(full)
    found: list[tuple[str, object, object]] = [
        (key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]
    ]
    left, right = repository.tree(lora), repository.tree(full)
    if left is not None and right is not None:
        found += [(each.key, each.left, each.right) for each in compare_arms(left, right, _ALLOWED)]
    return found


def _declared(script: Script) -> dict[str, Any]:
    """What a CONFIG block says of a run's size."""
    config = script.config
    return {
        "NUM_NODES": config.nodes,
        "GPUS_PER_NODE": config.gpus_per_node or DEFAULT_GPUS_PER_NODE,
        "MAX_STEPS": config.max_steps,
    }
