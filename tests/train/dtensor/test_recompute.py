# SPDX-License-Identifier: Apache-2.0
"""Selective checkpointing of transformers' modules: the same step, and no product is computed twice."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.dtensor.ranks import LORA, TINY, Setting, rows, run_ranks, supervised, wake_adapters

KEY = "policy.dtensor_cfg.activation_checkpointing"
PEFT = "policy.dtensor_cfg.lora_cfg.implementation=peft"
TP2 = "policy.dtensor_cfg.tensor_parallel_size=2"
DROPOUT = "policy.dtensor_cfg.lora_cfg.dropout=0.3"
BEFORE = "policy.dtensor_cfg.lora_cfg.dropout_position=pre"


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def steps(settings):
    """Of each setting loss, norm, gradients or updated weights, and counts of operations."""
    found = []
    for setting in settings:
        backend = setting.build()
        if backend.bank is not None:
            wake_adapters(backend)
        torch.manual_seed(7)
        with Counting() as counting:
            loss = backend.forward_backward([rows()], supervised(rows())).item()
        backend.sync_gradients()
        norm = backend.clip_gradients(None).item()
        trained = [backend.bank.gradient.clone()] if backend.bank is not None else []
        backend.optimizer_step(1e-2)
        trained += [] if backend.bank is not None else [backend.frozen_fingerprint()]
        found.append((loss, norm, trained, dict(counting.counts)))
    return found


def products(found):
    return sum(found[3].get(name, 0) for name in ("mm", "addmm", "bmm"))


def attention(found):
    return found[3]["_scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "world"),
    [((LORA,), 1), ((LORA,), 2), ((), 2), ((LORA, TP2), 2), ((LORA, PEFT), 1)],
    ids=["lora", "lora-fsdp2", "full-fsdp2", "lora-tp2", "peft"],
)
def test_the_same_step_without_a_product_more(tmp_path, arm, world):
    which = ("false", "selective", "true")
    settings = [Setting((*arm, f"{KEY}={each}"), precision="float64", world=world) for each in which]
    for plain, some, every in run_ranks(world, tmp_path / "ranks", steps, settings):
        assert some[:2] == plain[:2]
        for mine, right in zip(some[2], plain[2], strict=True):
            assert mine == right if isinstance(mine, str) else torch.equal(mine, right)
        # Recomputation asks for the first layer's input's gradient though nothing trains before it.
        first = 9 if arm else 0
        more = [products(found) - products(plain) for found in (some, every)]
        assert 0 <= more[0] <= first < more[1]
        assert attention(plain) == attention(some) < attention(every)
        # Norms are computed again: a root each.
        assert plain[3]["rsqrt"] < some[3]["rsqrt"] <= every[3]["rsqrt"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_of_some_layers_everything_is_computed_again(tmp_path, world):
    """Of the first of two: half of the products that computing everything again takes, but for o and down."""
    some = (LORA, f"{KEY}=selective")
    arms = [(LORA,), some, (*some, "policy.dtensor_cfg.recompute_mlp_layers=1"), (LORA, f"{KEY}=true")]
    settings = [Setting(arm, precision="float64", world=world) for arm in arms]
    for plain, selective, half, every in run_ranks(world, tmp_path / "ranks", steps, settings):
        assert half[:2] == plain[:2]
        assert all(torch.equal(one, other) for one, other in zip(half[2], plain[2], strict=True))
        assert attention(half) - attention(plain) == 1
        assert attention(every) - attention(plain) == 2
        assert products(selective) < products(half) < products(every)


def test_nothing_is_added_twice_into_what_is_kept(tmp_path):
    """Biases, and adapters with dropout, whose masks are drawn again: a product may be written into once."""
    biased = tmp_path / "biased.json"
    biased.write_text(json.dumps(json.loads(TINY.read_text()) | {"attention_bias": True, "mlp_bias": True}))
    arms = [(), (LORA,), (LORA, DROPOUT), (LORA, DROPOUT, BEFORE), (LORA, PEFT, DROPOUT, BEFORE)]
    settings = [
        Setting((*arm, f"{KEY}={which}"), biased, "float64")
        for arm in arms
        for which in ("false", "selective")
    ]
    (found,) = run_ranks(1, tmp_path / "ranks", steps, settings)
    losses = set()
    for plain, some in zip(found[::2], found[1::2], strict=True):
        assert some[:2] == plain[:2]
        for mine, right in zip(some[2], plain[2], strict=True):
            assert mine == right if isinstance(mine, str) else torch.equal(mine, right)
        losses.add(plain[0])
    # Adapters change the loss, and masks do, each kind its own.
    assert len(losses) == len(arms)
