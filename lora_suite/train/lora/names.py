# SPDX-License-Identifier: Apache-2.0
"""What frameworks call the two factors of an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# What stands for A and for B in a parameter's dotted name.
PATTERNS = (
    ("lora_A", "lora_B"),  # PEFT, Automodel
    ("lora_gate_and_up_A", "lora_gate_and_up_B"),  # Automodel's grouped experts
    ("lora_down_A", "lora_down_B"),
    ("adapter.linear_in", "adapter.linear_out"),  # Megatron-Bridge
    ("lora_a", "lora_b"),  # torchtitan
)
# What PEFT trains beside the factors when it is asked to.
DELIBERATE = ("modules_to_save", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class Place:
    """Which factor a parameter is, and of what. module: the name before it, prefix of the adapted linear.

    adapter: equal for the two factors of one adapter and for no other.
    """

    kind: Literal["a", "b"]
    module: str
    adapter: str


def place(name: str, patterns: Iterable[tuple[str, str]] = PATTERNS) -> Place | None:
    """Where a parameter of this name belongs, None if it is no factor of an adapter.

    patterns: pairs of words for A and for B; a word is whole between dots and may contain dots.
    """
    for a, b in patterns:
        for kind, word in (("a", a), ("b", b)):
            found = re.search(rf"(?:^|(?<=\.)){re.escape(word)}(?=\.|$)", name)
            if found:
                before, after = name[: found.start()], name[found.end() :]
                return Place("a" if kind == "a" else "b", before.rstrip("."), f"{before}{a}|{b}{after}")
    return None


def few(names: Sequence[str], separator: str = ", ", most: int = 6) -> str:
    """Names for a message: the first ones, and how many more there are."""
    rest = len(names) - most
    return separator.join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
