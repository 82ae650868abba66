# SPDX-License-Identifier: Apache-2.0
"""Adapters of stacks of experts in PEFT's form, and back.

PEFT adapts a parameter of three dimensions (``target_parameters``) by a wrapper around its module; where a
module has several, the wrappers lie in one another, the first parameter's innermost, as its ``base_layer``.
The factors of all experts are one matrix each: A [experts · rank, in], expert after expert, and B [out,
rank · experts], whose columns go through the experts first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Last names of stacks, in the order in which a module has them."""
_BASE = ".base_layer"
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def is_stack(name: str) -> bool:
    """Whether a full name is that of a stack of routed experts."""
    owner, _, last = name.rpartition(".")
    return last in STACKS and owner.rpartition(".")[2] == "experts"


def to_peft(factors: Pairs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A [experts, rank, in] and B [experts, out, rank] by the stack's name, as PEFT's by its module's."""
    modules = _modules(list(factors))
    return {
        modules[name]: (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) for name, (a, b) in factors.items()
    }


def from_peft(
    pairs: Pairs, parameters: Sequence[str], rank: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The factors of stacks among PEFT's pairs by module; what is none of them is left out.

    parameters: full names of the stacks. rank: of one expert.
    """
    modules = _modules(parameters)
    found = {}
    for name in parameters:
        if modules[name] in pairs:
            a, b = pairs[modules[name]]
            experts = a.shape[0] // rank
            found[name] = (
                a.view(experts, rank, -1),
                b.view(b.shape[0], rank, experts).permute(2, 0, 1).contiguous(),
            )
    return found


def _modules(names: Sequence[str]) -> dict[str, str]:
    """PEFT's module of each stack: the owner's name, and a `base_layer` for each adapted stack after it."""
    modules = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        later = STACKS[STACKS.index(last) + 1 :]
        modules[name] = owner + _BASE * sum(f"{owner}.{each}" in names for each in later)
    return modules
