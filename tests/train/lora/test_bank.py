# SPDX-License-Identifier: Apache-2.0
"""The bank: one buffer that behaves like many tensors, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lora_suite.config.schema import Optimizer, OptimizerKwargs
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.topology import Axis
from tests.train.dtensor.ranks import run_ranks
from tests.train.lora.adapters import bank_of, shards, spec, topology

SHAPES = {"q": (6, 8), "up": (6, 10), "down": (10, 6)}


def optimizer(name: str = "torch.optim.AdamW", **changes: Any) -> Optimizer:
    values: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "foreach": None,
        "fused": None,
    }
    return Optimizer.model_validate({"name": name, "kwargs": OptimizerKwargs(**(values | changes))})


def bank_of_three(**changes: object) -> AdapterBank:
    return bank_of([Adapter(name, *shape, spec(**changes)) for name, shape in SHAPES.items()])


def fill_gradient(bank: AdapterBank, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bank.gradient.copy_(torch.randn(bank.gradient.shape, generator=generator, dtype=torch.float64))


def copies(bank: AdapterBank) -> list[torch.nn.Parameter]:
    """The factors as tensors of their own, with gradients of their own."""
    made = []
    for parameter in bank.parameters():
        copy = torch.nn.Parameter(parameter.detach().clone())
        assert parameter.grad is not None
        copy.grad = parameter.grad.clone()
        made.append(copy)
    return made


@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_clipping_is_that_of_torch(limit: float | None) -> None:
    bank = bank_of_three()
    fill_gradient(bank, 3)
    reference = copies(bank)
    expected = torch.nn.utils.clip_grad_norm_(reference, limit if limit is not None else float("inf"))
    bank.sync_gradients()
    torch.testing.assert_close(bank.clip_gradients(limit), expected)
    for slot, parameter in zip(bank.slots, reference, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(bank.master_gradient[slot.start : slot.stop], parameter.grad.flatten())


@pytest.mark.parametrize(("name", "kind"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)])
def test_steps_are_those_of_torch_on_every_tensor(name: str, kind: type[torch.optim.Adam]) -> None:
    bank = bank_of_three()
    bank.build_optimizer(optimizer(f"torch.optim.{name}"))
    fill_gradient(bank, 0)
    reference = copies(bank)
    torch_optimizer = kind(reference, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step, lr in enumerate((0.01, 0.02, 0.005)):
        fill_gradient(bank, step)
        for own, copy in zip(bank.parameters(), reference, strict=True):
            assert own.grad is not None
            copy.grad = own.grad.clone()
        torch_optimizer.param_groups[0]["lr"] = lr
        torch_optimizer.step()
        bank.sync_gradients()
        bank.step(lr)
        assert float(bank.gradient.abs().max()) == 0.0
        for own, copy in zip(bank.parameters(), reference, strict=True):
            torch.testing.assert_close(own, copy)


def test_a_half_precision_model_is_updated_in_float32() -> None:
    bank = bank_of([Adapter("q", 6, 8, spec())], dtype=torch.bfloat16)
    bank.build_optimizer(optimizer(weight_decay=0.0))
    assert (bank.master.dtype, bank.compute.dtype) == (torch.float32, torch.bfloat16)
    before = bank.master.clone()
    for _ in range(4):
        bank.gradient.fill_(1.0)
        bank.sync_gradients()
        bank.step(1e-6)
    # Adam moves each value by the learning rate, far less than bfloat16 can tell apart.
    torch.testing.assert_close(before - bank.master, torch.full_like(before, 4e-6), rtol=0.1, atol=0)


def test_small_gradients_of_many_micro_batches_are_not_lost() -> None:
    bank = bank_of([Adapter("q", 6, 8, spec())], dtype=torch.bfloat16)
    bank.build_optimizer(optimizer())
    for _ in range(2):  # the next step begins anew
        for index, value in enumerate([1.0, *([2.0**-10] * 64)]):
            if index:
                bank.collect()
            bank.gradient.add_(value)
        bank.sync_gradients()
        # bfloat16 tells no 2⁻¹⁰ beside 1: summed in it, this would be 1.
        assert set(bank.master_gradient.tolist()) == {1.0 + 64 * 2.0**-10}
        assert set(bank.gradient.tolist()) == {1.0625}
        bank.step(0.01)


def test_adapters_have_their_own_dtype_when_told() -> None:
    bank = bank_of([Adapter("q", 6, 8, spec(dtype=torch.float32))], dtype=torch.bfloat16)
    assert bank.compute.dtype == torch.float32


def test_start_values_depend_on_seed_and_name_and_on_no_layout() -> None:
    whole = Adapter("q", 6, 8, spec())
    bank_of([whole])
    for placement, a_dim, b_dim in (("column", None, 0), ("row", 1, None)):
        ranks = [adapter for adapter, _ in shards(spec(), 6, 8, placement)]  # type: ignore[arg-type]
        for factor, dim in (("a", a_dim), ("b", b_dim)):
            parts = [getattr(adapter, factor).detach() for adapter in ranks]
            if dim is None:
                assert all(torch.equal(part, getattr(whole, factor)) for part in parts)
            else:
                assert torch.equal(torch.cat(parts, dim), getattr(whole, factor))
    other = Adapter("k", 6, 8, spec())
    bank_of([Adapter("first", 6, 8, spec()), other])
    assert not torch.equal(other.a, whole.a)


def test_replicated_factors_lie_in_front() -> None:
    axis = Axis(1, 2)
    adapters = [
        Adapter("q", 6, 8, spec(), "column", axis),
        Adapter("o", 8, 6, spec(), "row", axis),
        Adapter("head", 6, 4, spec()),
    ]
    bank = bank_of(adapters, topology(tp=axis))
    replicated = [slot.key for slot in bank.slots if slot.stop <= bank.replicated]
    assert replicated == ["q.a", "o.b", "head.a", "head.b"]
    assert bank.replicated == 3 * 6 + 6 * 3 + 3 * (6 + 4)
    assert len(bank.master) == bank.replicated + 4 * 3 + 3 * 4
    # Over all ranks, replicas once: r × (in + out).
    assert bank.trainable_parameters() == 3 * (6 + 8 + 8 + 6 + 6 + 4)


def test_moving_a_factor_moves_what_the_model_computes() -> None:
    adapter = Adapter("q", 6, 8, spec())
    bank = bank_of([adapter])
    x = torch.ones(1, 6, dtype=torch.float64)
    before = adapter(x).detach()
    bank.master.mul_(2.0)
    assert torch.equal(adapter(x).detach(), before)
    bank.publish()
    torch.testing.assert_close(adapter(x).detach(), 4.0 * before)


def test_disabled_within_and_enabled_again_even_after_an_error() -> None:
    bank = bank_of_three()

    def fail_within() -> None:
        with bank.disabled():
            assert not any(adapter.enabled for adapter in bank.adapters)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_within()
    assert all(adapter.enabled for adapter in bank.adapters)


def test_largest_is_of_each_factor() -> None:
    bank = bank_of_three()
    fill_gradient(bank, 1)
    expected = [float(parameter.grad.abs().max()) for parameter in copies(bank) if parameter.grad is not None]
    assert bank.largest(bank.gradient).tolist() == pytest.approx(expected)


def test_a_restored_bank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def steps(bank: AdapterBank, which: range) -> None:
        for step in which:
            fill_gradient(bank, step)
            bank.sync_gradients()
            bank.step(0.01)

    first = bank_of_three(dropout=0.2)
    first.build_optimizer(optimizer())
    steps(first, range(3))
    assert first.generator is not None
    torch.rand(7, generator=first.generator)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    steps(first, range(3, 5))

    second = bank_of_three(dropout=0.2)
    second.build_optimizer(optimizer())
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    steps(second, range(3, 5))
    assert torch.equal(first.master, second.master)
    assert torch.equal(first.compute, second.compute)
    assert second.generator is not None
    assert torch.equal(torch.rand(9, generator=first.generator), torch.rand(9, generator=second.generator))


def test_a_restored_bank_keeps_the_recipes_weight_decay() -> None:
    first, second = bank_of_three(), bank_of_three()
    first.build_optimizer(optimizer(weight_decay=0.1))
    fill_gradient(first, 1)
    first.sync_gradients()
    first.step(0.01)
    second.build_optimizer(optimizer(weight_decay=0.0))
    second.load_state_dict(first.state_dict())
    before = second.master.clone()
    second.gradient.zero_()
    second.sync_gradients()
    second._optimizer.state[second.master]["exp_avg"].zero_()  # type: ignore[union-attr]
    second.step(0.01)
    # Without a moment and without decay nothing moves.
    assert torch.equal(second.master, before)


def test_factors_that_differ_are_named() -> None:
    bank = bank_of_three()
    bank.build_optimizer(optimizer())
    state = bank.state_dict()
    state["factors"]["other.a"] = state["factors"].pop("q.a")
    with pytest.raises(KeyError, match=r"other\.a, q\.a"):
        bank.load_state_dict(state)


def test_an_empty_bank_is_refused() -> None:
    with pytest.raises(ValueError, match="no adapters"):
        bank_of([])


def summed_on_this_rank() -> dict[str, dict[str, torch.Tensor]]:
    """One of two ranks: sums over dp, then over tp, with gradients that name their rank."""
    rank = dist.get_rank()
    axis = Axis(rank, 2, dist.group.WORLD)

    bank = bank_of([Adapter("q", 6, 8, spec())], topology(dp=axis))
    bank.gradient.fill_(float(rank + 1))
    bank.sync_gradients()
    dp = {"gradient": bank.master_gradient.clone(), "norm": bank.clip_gradients(None)}

    adapters = [Adapter("q", 6, 8, spec(), "column", axis), Adapter("o", 8, 6, spec(), "row", axis)]
    bank = bank_of(adapters, topology(tp=axis))
    bank.gradient.fill_(float(rank + 1))
    bank.sync_gradients()
    tp = {
        "replicated": bank.master_gradient[: bank.replicated].clone(),
        "sharded": bank.master_gradient[bank.replicated :].clone(),
        "norm": bank.clip_gradients(None),
    }
    return {"dp": dp, "tp": tp}


@pytest.mark.slow
def test_two_ranks_sum_and_never_average(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(2, tmp_path / "ranks", summed_on_this_rank)):
        # Data parallel: 1 + 2 everywhere, in a bank of 3 × (6 + 8) values.
        assert set(result["dp"]["gradient"].tolist()) == {3.0}
        assert float(result["dp"]["norm"]) == pytest.approx((42 * 9) ** 0.5)
        # Tensor parallel: replicated factors are summed, shards are left alone.
        assert set(result["tp"]["replicated"].tolist()) == {3.0}
        assert set(result["tp"]["sharded"].tolist()) == {float(rank + 1)}
        # Replicas counted once: 36 values of 3; shards of both ranks: 24 of 1 and 24 of 2.
        assert float(result["tp"]["norm"]) == pytest.approx((36 * 9 + 24 * 1 + 24 * 4) ** 0.5)


def test_sgd_has_neither_momentum_nor_state() -> None:
    bank = bank_of([Adapter("q", 6, 8, spec())])
    bank.build_optimizer(optimizer("torch.optim.SGD", weight_decay=0.5))
    before = bank.master.clone()
    for _ in range(2):
        bank.gradient.fill_(2.0)
        bank.sync_gradients()
        bank.step(0.1)
    expected = before
    for _ in range(2):
        expected = expected - 0.1 * (2.0 + 0.5 * expected)
    torch.testing.assert_close(bank.master, expected)
    assert not any(state for state in bank.state_dict()["optimizer"]["state"].values() if any(state.values()))


def test_neighbours_are_one_parameter_over_the_same_memory() -> None:
    bank = bank_of_three()
    fill_gradient(bank, 7)
    _, up, down = bank.adapters
    both = bank.span([up, down])
    assert both is not None
    assert both.grad is not None
    for whole, parts in (
        (both.detach(), [up.a, up.b, down.a, down.b]),
        (both.grad, [up.a.grad, up.b.grad, down.a.grad, down.b.grad]),
    ):
        assert torch.equal(whole, torch.cat([part.detach().flatten() for part in parts if part is not None]))
    both.grad.add_(1.0)
    assert torch.equal(bank.gradient[-both.numel() :], both.grad)


def test_adapters_that_are_no_neighbours_have_no_common_parameter() -> None:
    bank = bank_of_three()
    q, up, down = bank.adapters
    assert bank.span([q, down]) is None
    assert bank.span([down, up]) is None
