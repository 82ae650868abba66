# SPDX-License-Identifier: Apache-2.0
"""Adapters whose norms are summed in pieces: each piece counts for its own adapter, wherever it ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_suite.train.lora import growth
from lora_suite.train.lora.adapter import Adapter
from tests.train.lora.adapters import bank_of, spec

# Rank 3: A and B have 18 and 24, 18 and 30, 30 and 18 elements.
SHAPES = {"q": (6, 8), "up": (6, 10), "down": (10, 6)}


@pytest.mark.parametrize("piece", [1, 6, 7, 24, 1000])
def test_norms_are_the_adapters_own(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(growth, "_PIECE", piece)
    bank = bank_of([Adapter(name, *shape, spec()) for name, shape in SHAPES.items()])
    expected = [math.hypot(each.a.norm().item(), each.b.norm().item()) for each in bank.adapters]
    np.testing.assert_allclose(growth.Growth(bank)._measure(), expected, rtol=1e-6)


@pytest.mark.parametrize("piece", [5, 1000])
def test_the_last_element_of_one_adapter_is_seen_in_it_alone(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(growth, "_PIECE", piece)
    bank = bank_of([Adapter(name, *shape, spec()) for name, shape in SHAPES.items()])
    watch = growth.Growth(bank)
    (last,) = [slot for slot in bank.slots if slot.key.startswith("up") and slot.factor == "b"]
    bank.master[last.stop - 1] = 1e4
    watch.look(3)
    bank.master[last.stop - 1] = math.nan
    watch.look(4)
    assert (watch.grown, watch.broken) == ({"up": 3}, {"up": 4})
