# SPDX-License-Identifier: Apache-2.0
"""The fast path on several ranks against the fast path on one: every value, whatever is split over ranks."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist

from lora_suite.blueprint.preflight import preflight
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.fast.decoder import split_dim
from tests.train.dtensor.ranks import (
    LORA,
    RECIPES,
    TINY,
    Setting,
    factors_of,
    rows,
    run_ranks,
    share,
    supervised,
    wake_adapters,
)

STEPS = 3
MAX_NORM = 0.1
CPU = torch.device("cpu")
TP = "policy.dtensor_cfg.tensor_parallel_size=2"


def build(setting):
    path = RECIPES / "sft.yaml"
    return fast.build(setting.recipe, path, preflight(setting.recipe, path), CPU, gpu=False)


def whole_weights(backend):
    """Every weight, gathered over tensor parallel ranks."""
    tp, weights = backend.topology.tp, {}
    for name, part in backend.model.named_tensors():
        dim = split_dim(name)
        if dim is None or tp.size == 1:
            weights[name] = part.clone()
            continue
        parts = [torch.empty_like(part) for _ in range(tp.size)]
        dist.all_gather(parts, part.contiguous(), group=tp.group)
        weights[name] = torch.cat(parts, dim)
    return weights


def train(setting, micro, steps=STEPS, backend=None, first=0):
    """Losses and norms of some steps, the last one's adapter gradients, and the weights after it."""
    if backend is None:
        backend = build(setting)
        if backend.bank is not None:
            wake_adapters(backend)
            backend.bank.publish()
    dp, seen, gradients = backend.topology.dp, [], {}
    for step in range(first, first + steps):
        batch = rows(seed=step)
        mine = share(batch, dp.index, dp.size, micro)
        loss = dp.sum(backend.forward_backward(mine, supervised(batch)).clone())
        backend.sync_gradients()
        if backend.bank is not None:
            gradients = factors_of(backend, backend.bank.master_gradient)
        norm = backend.clip_gradients(MAX_NORM)
        backend.optimizer_step(1e-2)
        seen += [loss.item(), norm.item(), dp.sum(backend.evaluate(mine).clone()).item()]
    values = factors_of(backend, backend.bank.master) if backend.bank is not None else whole_weights(backend)
    return {
        "seen": seen,
        "gradients": gradients,
        "values": values,
        "trainable": backend.trainable_parameters(),
    }


def train_each(settings, micro):
    return [train(setting, micro) for setting in settings]


def near(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0, f"{name} is zero: nothing is compared"
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=1e-11 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def same_bits(ours, expected):
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def check(tmp_path, world, overrides, micro, model=TINY):
    """LoRA and full SFT on several ranks and on one."""
    arms = [(LORA,), ()]
    alone = [Setting(arm, model, "float64") for arm in arms]
    (expected,) = run_ranks(1, tmp_path / "one", train_each, alone, 4)
    settings = [Setting((*arm, *overrides), model, "float64", world) for arm in arms]
    ranks = run_ranks(world, tmp_path / "ranks", train_each, settings, micro)
    for results in ranks:
        for ours, first, one in zip(results, ranks[0], expected, strict=True):
            assert ours["seen"] == pytest.approx(one["seen"], rel=1e-11)
            assert ours["seen"][1] > 10 * MAX_NORM
            assert ours["trainable"] == one["trainable"]
            near(ours["gradients"], one["gradients"])
            near(ours["values"], one["values"])
            same_bits(ours["values"], first["values"])


def model_file(folder, **keys):
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(TINY.read_text()) | keys))
    return path


@pytest.mark.slow
def test_two_tensor_parallel_ranks(tmp_path):
    """qwen2 is llama with biases of queries, keys and values."""
    check(tmp_path, 2, (TP,), micro=4, model=model_file(tmp_path, model_type="qwen2"))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [2, 1])
def test_two_data_parallel_ranks(tmp_path, micro):
    check(tmp_path, 2, (), micro)


@pytest.mark.slow
def test_two_by_two_ranks_with_a_tied_head_and_head_norms(tmp_path):
    """Norms of query and key heads are replicated, but each tensor parallel rank sees its own heads only."""
    path = model_file(tmp_path, model_type="qwen3", tie_word_embeddings=True)
    check(tmp_path, 4, (TP,), micro=1, model=path)


def resume_each(settings):
    """For each setting the last of three steps: straight on, and by another backend from the state before."""
    results = []
    for setting in settings:
        straight = build(setting)
        if straight.bank is not None:
            wake_adapters(straight)
            straight.bank.publish()
        train(setting, 2, 2, straight)
        state = copy.deepcopy(straight.state_dict())
        resumed = build(setting)
        resumed.load_state_dict(state)
        results.append([train(setting, 2, 1, each, first=2) for each in (straight, resumed)])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(TP,), ()], ids=["tp2", "dp2"])
def test_a_resumed_training_goes_on_bit_by_bit(tmp_path, layout):
    settings = [
        Setting((*lora, *layout), precision=precision, world=2)
        for lora in ((LORA,), ())
        for precision in ("bfloat16", "float32")
    ]
    for results in run_ranks(2, tmp_path / "ranks", resume_each, settings):
        for straight, resumed in results:
            assert straight["seen"] == resumed["seen"]
            same_bits(straight["values"], resumed["values"])
