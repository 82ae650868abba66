# SPDX-License-Identifier: Apache-2.0
"""The family's script names, ``<algo>-<model>-<N>n<G>g-<strategy>[-modifiers]``, and LoRA in recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from lora_suite.plan.comparability import BACKENDS

_NAME = re.compile(r"(?P<family>.+?)-(?P<nodes>\d+)n(?P<gpus>\d+)g(?:-(?P<rest>.+))?")
_LORA = "lora"


@dataclass(frozen=True)
class ScriptName:
    """A name taken apart. family: algorithm and model. strategy: words after the sizes, without ``lora``."""

    family: str
    nodes: int
    gpus: int
    strategy: tuple[str, ...]
    lora: bool

    @property
    def backend(self) -> str:
        """The strategy's first word without sizes: fsdp2tp1 is fsdp."""
        return "".join(takewhile(str.isalpha, self.strategy[0])) if self.strategy else ""


def parse_name(name: str) -> ScriptName | None:
    """Take a script's name apart; None for one that states no sizes."""
    match = _NAME.fullmatch(name.lower())
    if match is None:
        return None
    words = (match["rest"] or "").split("-")
    return ScriptName(
        family=match["family"],
        nodes=int(match["nodes"]),
        gpus=int(match["gpus"]),
        strategy=tuple(word for word in words if word not in ("", _LORA)),
        lora=_LORA in words,
    )


def lora_enabled(tree: Mapping[str, Any]) -> bool | None:
    """Whether an enabled backend of a recipe has LoRA on; None where it enables no backend."""
    policy = tree.get("policy")
    blocks = [policy.get(key.partition(".")[2]) for key in BACKENDS] if isinstance(policy, Mapping) else []
    used = [block for block in blocks if isinstance(block, Mapping) and block.get("enabled") is True]
    if not used:
        return None
    return any(
        isinstance(block.get("lora_cfg"), Mapping) and block["lora_cfg"].get("enabled") is True
        for block in used
    )
