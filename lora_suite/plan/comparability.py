# SPDX-License-Identifier: Apache-2.0
"""Whether two arms differ in nothing but what their pair is about.

Arms of one trainer are compared key by key in their recipes, arms of different trainers by what both say of
themselves (`lora_suite.plan.facts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_suite.config import ABSENT, differences
from lora_suite.config.schema import SlowPhase
from lora_suite.plan.facts import DECISIVE, FACTS, OURS, facts_of_recipe
from lora_suite.plan.model import AnyCase, Case, Difference, ExternalCase

FAULTS = "debug.faults"
# Allowed in every pair: the learning rate, which LoRA and full SFT need different, and names and paths.
ALLOWED = (
    "policy.optimizer.kwargs.lr",
    "policy.megatron_cfg.optimizer.lr",
    "policy.megatron_cfg.optimizer.min_lr",
    "logger.log_dir",
    "logger.wandb.name",
    "logger.wandb.project",
    "logger.profile_steps",
    "checkpointing.checkpoint_dir",
    FAULTS,
)
NO_FAULTS = {
    "freeze_b": False,
    "slow_step": 1.0,
    "slow_phase": dict.fromkeys(SlowPhase.model_fields, 0.0),
    "kill_rank_at": None,
    "out_of_memory_at": None,
    "stop_at": None,
}
BACKENDS = ("policy.dtensor_cfg", "policy.megatron_cfg")
_WITHOUT_FAULTS = {"debug": {"faults": NO_FAULTS}}
# What a pair is about, in words that every trainer has.
_ALLOWED_FACTS = ("lora",)
# Where another trainer's recipe says where things go and what they are called.
_ALLOWED_ELSEWHERE = ("logger",)


@dataclass(frozen=True)
class Comparison:
    """Two arms side by side.

    all: everything in which they differ. refused: what of it the pair does not allow. unknown: facts that one
    of them does not say, so that they were not compared.
    """

    all: tuple[Difference, ...]
    refused: tuple[Difference, ...]
    unknown: tuple[str, ...] = ()


def compare_cases(left: AnyCase, right: AnyCase, allow: Sequence[str] = ()) -> Comparison:
    """Compare two arms, by their recipes where both are of one trainer, else by their facts.

    allow: prefixes of keys, or names of facts, in which they may differ. Arms whose files cannot be read are
    not compared: they have no runs.
    """
    if isinstance(left, Case) and isinstance(right, Case):
        every = tuple(Difference(*found) for found in differences(left.tree, right.tree))
        return Comparison(every, compare_arms(left.tree, right.tree, allow))
    if not (isinstance(left, Case | ExternalCase) and isinstance(right, Case | ExternalCase)):
        return Comparison((), ())
    facts = _compare_facts(_facts(left), _facts(right), allow)
    ours, theirs = _recipe(left), _recipe(right)
    if ours is None or theirs is None or _facts(left)["trainer"] != _facts(right)["trainer"]:
        return facts
    every = tuple(Difference(*found) for found in differences(ours, theirs))
    refused = compare_arms(ours, theirs, (*allow, *_ALLOWED_ELSEWHERE))
    # The recipes say all but what is launched.
    launched = [found for found in facts.all if found.key == "ranks"]
    stopped = [found for found in launched if found in facts.refused]
    return Comparison((*launched, *every), (*stopped, *refused))


def _compare_facts(
    left: Mapping[str, object], right: Mapping[str, object], allow: Sequence[str]
) -> Comparison:
    """Compare what both arms say; without the decisive facts they cannot be compared at all."""
    found: list[Difference] = []
    refused: list[Difference] = []
    unknown: list[str] = []
    for name in FACTS:
        ours, theirs = left.get(name, ABSENT), right.get(name, ABSENT)
        if ours == theirs and ours != ABSENT:
            continue
        if ABSENT in (ours, theirs) and name not in DECISIVE:
            unknown += [name] if ours != theirs and name != "lora_rank" else []
            continue
        found.append(Difference(name, ours, theirs))
        if not _under(name, (*_ALLOWED_FACTS, *allow)):
            refused.append(found[-1])
    return Comparison(tuple(found), tuple(refused), tuple(unknown))


def _facts(case: Case | ExternalCase) -> dict[str, object]:
    return case.facts if isinstance(case, ExternalCase) else facts_of_recipe(case.tree, OURS)


def _recipe(case: Case | ExternalCase) -> Mapping[str, Any] | None:
    return case.recipe_tree if isinstance(case, ExternalCase) else None


def compare_arms(
    left: Mapping[str, Any], right: Mapping[str, Any], allow: Sequence[str] = ()
) -> tuple[Difference, ...]:
    """Return the keys in which two resolved recipes differ although the pair does not allow it.

    Allowed are, besides the keys under the prefixes of `allow`: `ALLOWED`, the LoRA block of a backend that
    is enabled in either arm, and whatever stands in the block of a backend that neither arm enables.
    """
    allowed = (*ALLOWED, *_backend_keys(left, right), *allow)
    return tuple(Difference(*found) for found in differences(left, right) if not _under(found[0], allowed))


def with_faults(case: AnyCase) -> Mapping[str, Any]:
    """A tree that holds the planted faults of a case; only ours can have any."""
    return case.tree if isinstance(case, Case) else _WITHOUT_FAULTS


def planted_faults(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the planted faults in which two resolved recipes differ, for the report to name."""
    return tuple(Difference(*found) for found in differences(left, right) if _under(found[0], [FAULTS]))


def _backend_keys(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterable[str]:
    """Yield, for each backend, its LoRA block if either arm enables it, else the whole block."""
    for key in BACKENDS:
        used = any(_at(tree, f"{key}.enabled") for tree in (left, right))
        yield f"{key}.lora_cfg" if used else key


def _at(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None where the tree has none."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _under(key: str, prefixes: Iterable[str]) -> bool:
    """Whether the key is one of the prefixes or lies below one."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
