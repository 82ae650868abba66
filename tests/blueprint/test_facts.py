# SPDX-License-Identifier: Apache-2.0
"""Counts, coverage and the arithmetic floor."""

from __future__ import annotations

import pytest

from lora_suite.blueprint import Blueprint, preflight
from lora_suite.config import load_recipe
from tests.config.helpers import RECIPES, TINY, TINY_LORA, TINY_MEGATRON_LORA


def blueprint(path, *overrides):
    return preflight(load_recipe(path, overrides).recipe, path)


def test_full_sft_trains_everything_and_has_no_adapters():
    facts = blueprint(TINY)
    assert facts.trainable_params == facts.total_params == 115_008
    assert facts.adapters == ()
    assert facts.layer_coverage == 0.0
    assert facts.rank is None


@pytest.mark.parametrize(
    ("path", "overrides", "adapters", "params"),
    [
        (TINY_LORA, [], 14, 16_384),
        (TINY_LORA, ["policy.dtensor_cfg.lora_cfg.dim=16"], 14, 32_768),
        (TINY_MEGATRON_LORA, [], 14, 16_384),
        (TINY_MEGATRON_LORA, ["policy.megatron_cfg.lora_cfg.fused=true"], 8, 13_312),
    ],
)
def test_lora_trains_rank_times_in_plus_out(path, overrides, adapters, params):
    facts = blueprint(path, *overrides)
    assert (len(facts.adapters), facts.trainable_params, facts.layer_coverage) == (adapters, params, 1.0)


def test_layer_coverage_is_the_share_of_adapted_layers():
    entries = "policy.dtensor_cfg.lora_cfg.target_modules=['*.layers.1.*', lm_head]"
    assert blueprint(TINY_LORA, entries).layer_coverage == 0.5
    assert blueprint(TINY_LORA, "policy.dtensor_cfg.lora_cfg.target_modules=[lm_head]").layer_coverage == 0.0


# The tiny model: 36,864 matrix elements a layer, a head of 64 × 320, attention of 4 heads × 16, 64 slots.
LAYER, HEAD, ATTENTION = 36_864, 20_480, 6 * 2 * 64 * 64


def test_full_sft_costs_six_operations_a_parameter():
    facts = blueprint(TINY)
    assert facts.active_params == 2 * LAYER + HEAD
    assert facts.flops_per_token("full") == 6 * (2 * LAYER + HEAD) + ATTENTION


def test_lora_costs_four_and_six_for_its_own():
    facts = blueprint(TINY_LORA)
    assert facts.flops_per_token("lora") == 4 * (2 * LAYER + HEAD) + 6 * 16_384 + ATTENTION


def test_nothing_flows_back_below_the_lowest_adapter():
    facts = blueprint(TINY_LORA, "policy.dtensor_cfg.lora_cfg.target_modules=['*.layers.1.*']")
    assert facts.flops_per_token("lora") == 2 * LAYER + 4 * (LAYER + HEAD) + 6 * 8_192 + ATTENTION
    head = blueprint(TINY_LORA, "policy.dtensor_cfg.lora_cfg.target_modules=[lm_head]")
    assert head.flops_per_token("lora") == 2 * 2 * LAYER + 4 * HEAD + 6 * 8 * 384 + ATTENTION


def test_arithmetic_of_one_row_of_2048_takes_fourteen_ms_at_790_tflops():
    facts = blueprint(RECIPES / "sft-llama3.2-1b-1n1g-fsdp2-lora.yaml")
    assert 2048 * facts.flops_per_token("lora") / 790e12 == pytest.approx(0.014, rel=0.01)
    assert facts.flops_per_token("full") / facts.flops_per_token("lora") == pytest.approx(1.45, abs=0.05)


def test_an_unknown_model_has_no_floor():
    facts = Blueprint(None, (), (), 8, 1024, 0)
    assert (facts.trainable_params, facts.layer_coverage, facts.active_params) == (0, 0.0, 0)
    with pytest.raises(ValueError, match="not known"):
        facts.flops_per_token("lora")
