# SPDX-License-Identifier: Apache-2.0
"""Adapters and banks for tests, without a model and without other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lora_suite.train.lora.adapter import Adapter, Placement
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.topology import Axis, Topology

SPEC = LoraSpec(
    rank=3,
    alpha=6.0,
    dropout=0.0,
    dropout_position="pre",
    a_init="xavier",
    b_init="xavier",
    dtype=None,
    seed=11,
)
ONE = Axis(0, 1)


def spec(**changes: object) -> LoraSpec:
    """The standard kind of adapter with some fields changed; B does not start at zero."""
    return replace(SPEC, **changes)  # type: ignore[arg-type]


def topology(dp: Axis = ONE, tp: Axis = ONE) -> Topology:
    """A CPU rank at these places."""
    return Topology(dp.index * tp.size + tp.index, dp.size * tp.size, torch.device("cpu"), dp, tp, ONE)


def bank_of(
    adapters: Sequence[Adapter], where: Topology | None = None, dtype: torch.dtype = torch.float64
) -> AdapterBank:
    """A bank that owns these adapters."""
    return AdapterBank(adapters, where if where is not None else topology(), dtype)


def shards(
    kind: LoraSpec, inputs: int, outputs: int, placement: Placement, size: int = 2
) -> list[tuple[Adapter, AdapterBank]]:
    """One adapter as each of `size` tensor parallel ranks has it."""
    made = []
    for index in range(size):
        axis = Axis(index, size)
        adapter = Adapter("q", inputs, outputs, kind, placement, axis)
        made.append((adapter, bank_of([adapter], topology(tp=axis))))
    return made
