# SPDX-License-Identifier: Apache-2.0
"""Adapters of routed experts against the formula written out an expert at a time, and in the bank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from lora_suite.train.lora.experts import ExpertAdapter, SharedExpertAdapter
from lora_suite.train.lora.grouped import Form, grouped_linear, grouped_lora
from lora_suite.train.topology import Axis, Topology
from tests.train.dtensor.ranks import run_ranks
from tests.train.lora.adapters import ONE, bank_of, spec, topology

EXPERTS, INPUTS, OUTPUTS, SCALE = 4, 16, 24, 1.75
COUNTS = (5, 0, 1, 7)  # one expert without a row
ENDS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
Leaves = dict[str, torch.Tensor]


def leaves(rank: int, dtype: torch.dtype) -> Leaves:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "x": (sum(COUNTS), INPUTS),
        "weight": (EXPERTS, OUTPUTS, INPUTS),
        "a": (EXPERTS, rank, INPUTS),
        "b": (EXPERTS, OUTPUTS, rank),
    }
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    return {name: value.to(dtype).requires_grad_() for name, value in drawn.items()}


def by_hand(each: Leaves, adapted: bool) -> torch.Tensor:
    """Every row with its expert's matrices, by autograd."""
    owners = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    rows = []
    for row, expert in zip(each["x"], owners, strict=True):
        y = each["weight"][expert] @ row
        if adapted:
            y = y + SCALE * (each["b"][expert] @ (each["a"][expert] @ row))
        rows.append(y)
    return torch.stack(rows)


def backward(y: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(6)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))


@pytest.mark.parametrize(
    ("form", "rank", "dtype"),
    [("loop", 3, torch.float64), ("grouped", 8, torch.float32), ("grouped", 3, torch.float32)],
)
def test_grouped_adapters_are_the_formula(form: Form, rank: int, dtype: torch.dtype) -> None:
    """Rank 3 is none that grouped multiplication takes."""
    expected, found = leaves(rank, torch.float64), leaves(rank, dtype)
    y = grouped_lora(found["x"], found["weight"], found["a"], found["b"], ENDS, SCALE, form)
    reference = by_hand(expected, adapted=True)
    backward(y)
    backward(reference)
    near: dict[str, Any] = {"check_dtype": False} | (
        {"rtol": 1e-4, "atol": 1e-4} if form == "grouped" else {}
    )
    torch.testing.assert_close(y, reference, **near)
    for name, leaf in found.items():
        torch.testing.assert_close(leaf.grad, expected[name].grad, **near)


def test_gradients_are_added_to_those_that_are_there() -> None:
    expected, found = leaves(3, torch.float64), leaves(3, torch.float64)
    for name in ("a", "b"):
        found[name].grad = torch.ones_like(found[name])
    backward(
        grouped_lora(
            found["x"], found["weight"], found["a"], found["b"], ENDS, SCALE, "loop", accumulate=True
        )
    )
    backward(by_hand(expected, adapted=True))
    for name in ("a", "b"):
        gradient = expected[name].grad
        assert gradient is not None
        torch.testing.assert_close(found[name].grad, gradient + 1.0)


@pytest.mark.parametrize("form", ["loop", "grouped"])
def test_experts_without_adapters_and_without_rows(form: Form) -> None:
    each = leaves(3, torch.float32)
    torch.testing.assert_close(
        grouped_linear(each["x"], each["weight"], ENDS, form), by_hand(each, adapted=False)
    )
    none = grouped_linear(each["x"][:0], each["weight"], torch.zeros_like(ENDS), form)
    assert none.shape == (0, OUTPUTS)


def test_an_adapter_of_every_expert_is_a_citizen_of_the_bank() -> None:
    kind = spec(b_init="zero")
    adapter = ExpertAdapter("up", INPUTS, OUTPUTS, kind, EXPERTS, "loop")
    bank = bank_of([adapter])
    assert bank.trainable_parameters() == EXPERTS * 3 * (INPUTS + OUTPUTS) == len(bank.master)
    assert [(slot.key, slot.stop - slot.start) for slot in bank.slots] == [
        ("up.a", EXPERTS * 3 * INPUTS),
        ("up.b", EXPERTS * 3 * OUTPUTS),
    ]
    each = leaves(3, torch.float64)
    x, weight = each["x"], each["weight"].detach()
    base = grouped_linear(x, weight, ENDS, "loop")
    torch.testing.assert_close(adapter(x, weight, ENDS), base)
    adapter(x, weight, ENDS).sum().backward()
    largest = dict(zip([slot.key for slot in bank.slots], bank.largest(bank.gradient).tolist(), strict=True))
    assert largest["up.a"] == 0.0 < largest["up.b"]
    bank.master.fill_(0.5)
    bank.publish()
    assert float((adapter(x, weight, ENDS) - base).detach().abs().max()) > 0.1
    with bank.disabled():
        torch.testing.assert_close(adapter(x, weight, ENDS), base)


def test_xavier_is_that_of_one_experts_matrix_not_of_the_stack() -> None:
    """128 experts of Nemotron-3-Nano, rank 8: 0.027; by the stack's first dims it would be 0.009."""
    adapter = ExpertAdapter("up", 2688, 8, spec(rank=8, a_init="xavier"), 128, "loop")
    bank_of([adapter], dtype=torch.float32)
    assert float(adapter.a.detach().std()) == pytest.approx(math.sqrt(2 / (2688 + 8)), rel=0.01)


def test_all_experts_can_share_one_adapter() -> None:
    adapter = SharedExpertAdapter("up", INPUTS, OUTPUTS, spec(), form="loop")
    bank = bank_of([adapter])
    assert bank.trainable_parameters() == 3 * (INPUTS + OUTPUTS)
    each = leaves(3, torch.float64)
    weight = each["weight"].detach()
    update = functional.linear(functional.linear(each["x"], adapter.a), adapter.b) * adapter.spec.scale
    expected = by_hand(each, adapted=False) + update
    torch.testing.assert_close(adapter(each["x"], weight, ENDS), expected)


def test_an_expert_adapter_has_no_dropout() -> None:
    with pytest.raises(ValueError, match="has no dropout"):
        ExpertAdapter("up", 8, 8, spec(dropout=0.1), 4, "loop")


def split_bank() -> dict[str, Any]:
    """Two ranks hold two experts each: sums go over nobody for those, over both for what is replicated."""
    rank = dist.get_rank()
    both = Axis(rank, 2, dist.group.WORLD)
    where = Topology(rank, 2, torch.device("cpu"), both, ONE, ONE, ep=both, edp=Axis(0, 1))
    adapters = [
        ExpertAdapter("up", INPUTS, OUTPUTS, spec(), EXPERTS, "loop", both),
        SharedExpertAdapter("down", OUTPUTS, INPUTS, spec(), form="loop"),
    ]
    bank = bank_of(adapters, where)
    bank.gradient.fill_(rank + 1.0)
    bank.sync_gradients()
    return {
        "a": adapters[0].a.detach().clone(),
        "shared": bank.master_gradient[: bank.experts].clone(),
        "own": bank.master_gradient[bank.experts :].clone(),
        "squared_norm": float(bank.squared_norm()),
        "trainable": bank.trainable_parameters(),
        "state": (bank.replicated, bank.experts, len(bank.master)),
    }


def test_expert_parallel_ranks_hold_parts_of_the_bank(tmp_path: Path) -> None:
    alone = bank_of([ExpertAdapter("up", INPUTS, OUTPUTS, spec(), EXPERTS, "loop")], topology())
    results = run_ranks(2, tmp_path / "ranks", split_bank)
    a = alone.adapters[0].a.detach()
    assert torch.equal(torch.cat([result["a"] for result in results]), a)
    shared, stack = 3 * (INPUTS + OUTPUTS), EXPERTS * 3 * (INPUTS + OUTPUTS)
    for rank, result in enumerate(results):
        assert result["state"] == (shared, shared, shared + stack // 2)
        assert set(result["shared"].tolist()) == {3.0}
        assert set(result["own"].tolist()) == {float(rank + 1)}
        assert result["squared_norm"] == shared * 9.0 + stack // 2 * (1.0 + 4.0)
        assert result["trainable"] == shared + stack
