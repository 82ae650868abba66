# SPDX-License-Identifier: Apache-2.0
"""Published traps of LoRA on this backend, each with its thread; docs/correctness.md lists them all."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.train.dtensor.ranks import LORA, Setting, factors_of, rows, run_ranks, share, supervised

BLOCK = "policy.dtensor_cfg.lora_cfg"
TP2 = "policy.dtensor_cfg.tensor_parallel_size=2"
AGAIN = "policy.dtensor_cfg.activation_checkpointing=true"
ADAM = ("policy.optimizer.kwargs.eps=1e-8", "policy.optimizer.kwargs.weight_decay=0.0")
LR, STEPS = 1e-3, 10


def trained_on_this_rank(settings, steps):
    """For each setting: losses and norms, gradients of step 1, and every step's factors, whole."""
    results = []
    for setting in settings:
        backend = setting.build()
        dp, bank = backend.topology.dp, backend.bank
        result = {"losses": [], "norms": [], "factors": [factors_of(backend, bank.master)]}
        result["replicated"] = []
        for _ in range(steps):
            loss = backend.forward_backward(share(rows(), dp.index, dp.size, 2), supervised(rows()))
            backend.sync_gradients()
            result.setdefault("first_gradient", factors_of(backend, bank.master_gradient))
            result["second_gradient"] = factors_of(backend, bank.master_gradient)
            result["norms"].append(backend.clip_gradients(1.0).item())
            backend.optimizer_step(LR)
            result["losses"].append(dp.sum(loss.clone()).item() / supervised(rows()))
            result["factors"].append(factors_of(backend, bank.master))
            result["replicated"].append(bank.master[: bank.replicated].clone())
        results.append(result)
    return results


def micro_batches_on_this_rank(setting):
    """The gradient of four micro batches together, and that of each alone."""
    backend = setting.build()
    batches, gradients = share(rows(), 0, 1, 1), []
    for micros in (batches, *([each] for each in batches)):
        backend.forward_backward(micros, supervised(rows()))
        backend.sync_gradients()
        gradients.append(backend.bank.master_gradient.clone())
        backend.optimizer_step(0.0)
    return gradients


@pytest.mark.slow
def test_gradients_of_micro_batches_add_up_in_float32(tmp_path):
    """As a full training's do; reduced in bfloat16 elsewhere: https://github.com/radixark/miles/pull/1721."""
    setting = Setting((LORA, *ADAM), precision="bfloat16")
    ((together, *each),) = run_ranks(1, tmp_path / "ranks", micro_batches_on_this_rank, setting)
    assert len(each) == 4
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, sum(each), rtol=1e-6, atol=1e-8)
    assert not torch.equal(together, together.bfloat16().float())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process: as it is, recomputing activations, and with the head adapted as well."""
    plain, head = (LORA, *ADAM), f"{BLOCK}.target_modules=[lm_head, q_proj]"
    settings = [Setting(plain), Setting((*plain, AGAIN)), Setting((*plain, head))]
    (results,) = run_ranks(1, tmp_path_factory.mktemp("alone") / "ranks", trained_on_this_rank, settings, 2)
    return dict(zip(("plain", "recomputed", "head"), results, strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes: FSDP2 and tensor parallelism, ten steps."""
    settings = [Setting((LORA, *ADAM), world=2), Setting((LORA, *ADAM, TP2), world=2)]
    folder = tmp_path_factory.mktemp("two") / "ranks"
    return [
        dict(zip(("fsdp2", "tp2"), results, strict=True))
        for results in run_ranks(2, folder, trained_on_this_rank, settings, STEPS)
    ]


@pytest.mark.slow
def test_an_adapter_of_the_head_is_called(alone):
    """A fused loss that reads the head's weight leaves it out: https://github.com/unslothai/unsloth/pull/9331."""
    head = alone["head"]
    assert {name for name in head["first_gradient"] if name.startswith("lm_head")} == {
        "lm_head.a",
        "lm_head.b",
    }
    # B starts at zero, so A's first gradient is exactly zero and says nothing.
    for name, gradient in head["first_gradient"].items():
        assert bool(gradient.any()) == name.endswith(".b"), name
    assert all(bool(gradient.any()) for gradient in head["second_gradient"].values())


@pytest.mark.slow
def test_recomputation_cuts_no_adapter_off(alone):
    """https://github.com/huggingface/transformers/issues/26221: frozen embeddings, reentrant checkpoints."""
    plain, again = alone["plain"], alone["recomputed"]
    assert again["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert again["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    moved = [name for name, value in again["factors"][1].items() if name.endswith(".b") and value.any()]
    assert len(moved) == 14


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_no_factor_explodes_and_every_layer_trains(two, layout):
    """https://github.com/pytorch/torchtitan/issues/421, https://github.com/meta-pytorch/torchforge/issues/592."""
    factors = two[0][layout]["factors"]
    for before, after in pairwise(factors):
        for name, value in after.items():
            # Adam moves no value by more than lr · (1 - β₁) / √(1 - β₂).
            assert float((value - before[name]).abs().max()) <= 3.2 * LR, name
    still = [name for name, value in factors[-1].items() if torch.equal(value, factors[0][name])]
    assert still == []
    assert len(factors[0]) == 28


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_first_values_are_those_of_one_process(two, alone, layout):
    """Shards put together: https://github.com/huggingface/peft/pull/3079."""
    first, expected = two[0][layout]["factors"][0], alone["plain"]["factors"][0]
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_replicas_are_equal_bit_by_bit_after_each_of_ten_steps(two, layout):
    """A replicated factor whose gradients aren't summed drifts: https://github.com/modelscope/mcore-bridge/pull/173."""
    mine, theirs = (rank[layout]["replicated"] for rank in two)
    assert len(mine) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert not torch.equal(mine[0], mine[-1])
    assert two[0]["fsdp2"]["losses"] == pytest.approx(two[0]["tp2"]["losses"], rel=1e-4)
