# SPDX-License-Identifier: Apache-2.0
"""Several steps on two ranks: the loss falls, what is frozen stays, replicas agree, a state comes back."""

from __future__ import annotations

import io
import json

import pytest
import torch

from lora_suite.train.models.initialise import Weight, draw
from tests.train.dtensor.ranks import (
    LORA,
    TINY,
    Setting,
    rows,
    run_ranks,
    share,
    supervised,
    whole,
)

STEPS = 6
EPS = "policy.optimizer.kwargs.eps=1e-8"


def train(backend, steps, lr=2e-2):
    """Mean loss of each step on the same rows."""
    batch, dp, losses = rows(), backend.topology.dp, []
    for _ in range(steps):
        loss = backend.forward_backward(share(batch, dp.index, dp.size, 1), supervised(batch))
        backend.sync_gradients()
        backend.clip_gradients(1.0)
        backend.optimizer_step(lr)
        losses.append(dp.sum(loss.clone()).item() / supervised(batch))
    return losses


def lora_on_this_rank(setting):
    backend = setting.build()
    bank = backend.bank
    before, first = backend.frozen_fingerprint(), bank.master.clone()
    losses = train(backend, STEPS)
    return {
        "losses": losses,
        "trainable": backend.trainable_parameters(),
        "requires_grad": [name for name, p in backend.model.named_parameters() if p.requires_grad],
        "fingerprints": (before, backend.frozen_fingerprint()),
        "base": {name: whole(p) for name, p in backend.model.named_parameters() if ".adapter." not in name},
        "replicated": bank.master[: bank.replicated].clone(),
        "views": all(
            getattr(slot.adapter, slot.factor).data_ptr() == bank.compute[slot.start :].data_ptr()
            for slot in bank.slots
        ),
        "moved": [
            bool((bank.master[slot.start : slot.stop] != first[slot.start : slot.stop]).any())
            for slot in bank.slots
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2], ids=["dp2", "tp2"])
def test_lora_trains_adapters_alone(tmp_path, tp):
    setting = Setting((LORA, f"policy.dtensor_cfg.tensor_parallel_size={tp}", EPS), world=2)
    ranks = run_ranks(2, tmp_path / "ranks", lora_on_this_rank, setting)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]
        # 14 adapters of rank 8 on the T2 shape, counted by hand: 8 · (in + out) summed over all linears.
        assert rank["trainable"] == 16384
        assert len(rank["requires_grad"]) == 28
        assert all(".adapter." in name for name in rank["requires_grad"])
        assert rank["views"]
        assert all(rank["moved"])
        before, after = rank["fingerprints"]
        assert before == after != ""
        std = json.loads(TINY.read_text())["initializer_range"]
        for name, value in rank["base"].items():
            first = draw(Weight(name, tuple(value.shape)), std, setting.recipe.sft.seed, value.dtype, "cpu")
            assert torch.equal(value, first), name
    assert torch.equal(ranks[0]["replicated"], ranks[1]["replicated"])


def losses_on_this_rank(settings):
    return [train(setting.build(), STEPS, lr=2e-3) for setting in settings]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
@pytest.mark.parametrize("world", [1, 2])
def test_bfloat16_follows_float32(tmp_path, lora, world):
    settings = [Setting((*lora, EPS), TINY, precision, world) for precision in ("bfloat16", "float32")]
    half, single = run_ranks(world, tmp_path / "ranks", losses_on_this_rank, settings)[0]
    assert half != single
    assert half == pytest.approx(single, rel=0.01)
    assert half[-1] < 0.95 * half[0]


def masters_on_this_rank(setting):
    backend = setting.build()
    train(backend, 1)
    return {parameter.dtype for parameter in backend.model.parameters()}


@pytest.mark.slow
def test_full_bfloat16_training_keeps_float32_masters(tmp_path):
    setting = Setting(precision="bfloat16")
    (dtypes,) = run_ranks(1, tmp_path / "ranks", masters_on_this_rank, setting)
    assert dtypes == {torch.float32}


def resumed_on_this_rank(setting):
    """Losses of 2 + 2 steps straight, and of the last two in a new backend that loads the state after 2."""
    straight = setting.build()
    train(straight, 2)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    last = train(straight, 2)
    resumed = setting.build()
    resumed.load_state_dict(saved)
    return last, train(resumed, 2), train(setting.build(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(LORA,), (), ("policy.dtensor_cfg.tensor_parallel_size=2",)])
def test_a_loaded_state_continues_bit_by_bit(tmp_path, overrides):
    setting = Setting((*overrides, EPS), world=2)
    for straight, resumed, fresh in run_ranks(2, tmp_path / "ranks", resumed_on_this_rank, setting):
        assert resumed == straight
        assert fresh != straight


def mismatched_on_this_rank(setting):
    backend = setting.build()
    state = backend.state_dict()
    state["parameters"] = {
        name: value for name, value in state["parameters"].items() if name != "model.norm.weight"
    }
    backend.load_state_dict(state)


@pytest.mark.slow
def test_a_state_without_a_parameter_is_refused(tmp_path):
    with pytest.raises(AssertionError, match=r"KeyError.*model\.norm\.weight"):
        run_ranks(1, tmp_path / "ranks", mismatched_on_this_rank, Setting())
