# SPDX-License-Identifier: Apache-2.0
"""Whether two arms differ in nothing but what their pair is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lora_suite.config import differences
from lora_suite.plan.model import Difference

FAULTS = "debug.faults"
# Allowed in every pair: the learning rate, which LoRA and full SFT need different, and names and paths.
ALLOWED = (
    "policy.optimizer.kwargs.lr",
    "policy.megatron_cfg.optimizer.lr",
    "policy.megatron_cfg.optimizer.min_lr",
    "logger.log_dir",
    "logger.wandb.name",
    "logger.wandb.project",
    "checkpointing.checkpoint_dir",
    FAULTS,
)
BACKENDS = ("policy.dtensor_cfg", "policy.megatron_cfg")


def compare_arms(
    left: Mapping[str, Any], right: Mapping[str, Any], allow: Sequence[str] = ()
) -> tuple[Difference, ...]:
    """Return the keys in which two resolved recipes differ although the pair does not allow it.

    Allowed are, besides the keys under the prefixes of `allow`: `ALLOWED`, the LoRA block of a backend that
    is enabled in either arm, and whatever stands in the block of a backend that neither arm enables.
    """
    allowed = (*ALLOWED, *_backend_keys(left, right), *allow)
    return tuple(Difference(*found) for found in differences(left, right) if not _under(found[0], allowed))


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
