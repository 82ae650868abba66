# SPDX-License-Identifier: Apache-2.0
"""What the linears of real models add with their adapters, however a backend computes them."""

from __future__ import annotations

import pytest

from lora_suite.train.lora.probes import drawn_b, scale_found
from tests.train.dtensor.ranks import LORA, Setting, rows, run_ranks
from tests.train.dtensor.test_fast import build_fast

PEFT = (
    LORA,
    "policy.dtensor_cfg.lora_cfg.implementation=peft",
    "policy.dtensor_cfg.lora_cfg.dropout_position=pre",
)
TP = (LORA, "policy.dtensor_cfg.tensor_parallel_size=2")
LAYERS = 2


def multiples(settings, doubled=False):
    """By setting, what `scale_found` says; `doubled` spoils what the fast path multiplies with."""
    found = {}
    for name, setting in settings.items():
        backend = build_fast(setting) if name.startswith("fast") else setting.build()
        with drawn_b(backend.bank):
            if doubled:
                for linear in backend.model.linears():
                    for frame in linear.frame_parts()[1]:
                        frame.mul_(2.0)
            found[name] = scale_found(backend, backend.bank, [rows()])
    return found


@pytest.mark.slow
def test_every_implementation_adds_what_the_formula_says(tmp_path):
    settings = {
        "eager": Setting((LORA,), precision="float64"),
        "fast": Setting((LORA,), precision="float64"),
        "peft": Setting(PEFT, precision="float64"),
        "fast peft": Setting((LORA, PEFT[1]), precision="float64"),
    }
    (found,) = run_ranks(1, tmp_path / "ranks", multiples, settings)
    for name, of_adapters in found.items():
        # q, k, v, o, gate, up, down of each layer.
        assert len(of_adapters) == 7 * LAYERS, name
        assert list(of_adapters.values()) == pytest.approx([1.0] * 7 * LAYERS, rel=1e-9), name


@pytest.mark.slow
def test_a_scale_that_the_fast_path_applies_twice_is_seen(tmp_path):
    setting = {"fast": Setting((LORA,), precision="float64")}
    (found,) = run_ranks(1, tmp_path / "ranks", multiples, setting, True)
    assert list(found["fast"].values()) == pytest.approx([2.0] * 7 * LAYERS, rel=1e-9)


@pytest.mark.slow
def test_ranks_ask_for_their_own_part(tmp_path):
    setting = {"tp": Setting(TP, precision="float64", world=2)}
    for found in run_ranks(2, tmp_path / "ranks", multiples, setting):
        assert list(found["tp"].values()) == pytest.approx([1.0] * 7 * LAYERS, rel=1e-9)


def frozen_names(settings):
    return [sorted(name for name, _ in build_fast(setting).model.named_tensors()) for setting in settings]


@pytest.mark.slow
def test_peft_s_model_has_its_weights_under_transformers_names(tmp_path):
    settings = [Setting(keys, precision="float64") for keys in ((LORA,), (LORA, PEFT[1]))]
    ((ours, peft),) = run_ranks(1, tmp_path / "ranks", frozen_names, settings)
    assert peft == ours
    assert "lm_head.weight" in peft
