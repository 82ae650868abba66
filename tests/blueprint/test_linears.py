# SPDX-License-Identifier: Apache-2.0
"""Linears and parameter counts."""

from __future__ import annotations

import pytest

from lora_suite.blueprint import model_linears, read_shape, total_params
from tests.blueprint.helpers import MODELS, shape_of, t2_linears


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("llama-3.2-1b.json", 1_235_814_400),
        ("llama-3.1-8b.json", 8_030_261_248),
        ("qwen3-0.6b.json", 596_049_920),
        ("nemotron-3-nano-30b-a3b.json", 31_577_937_344),
        ("tiny-llama.json", 115_008),
        ("tiny-qwen3-moe.json", 165_248),
    ],
)
def test_parameter_counts_of_the_shipped_models(file, count):
    assert total_params(read_shape(MODELS / file)) == count


def test_names_and_sizes_of_a_layer(tmp_path):
    layer = [(x.name, x.in_features, x.out_features) for x in t2_linears(tmp_path) if x.layer == 1]
    assert layer == [
        ("model.layers.1.self_attn.q_proj", 64, 64),
        ("model.layers.1.self_attn.k_proj", 64, 32),
        ("model.layers.1.self_attn.v_proj", 64, 32),
        ("model.layers.1.self_attn.o_proj", 64, 64),
        ("model.layers.1.mlp.gate_proj", 64, 128),
        ("model.layers.1.mlp.up_proj", 64, 128),
        ("model.layers.1.mlp.down_proj", 128, 64),
    ]


def test_the_head_comes_last_and_is_in_no_layer(tmp_path):
    head = t2_linears(tmp_path, tie_word_embeddings=True)[-1]
    assert (head.name, head.out_features, head.layer, head.kind) == ("lm_head", 256, None, "head")


def test_a_tied_head_counts_once_but_still_multiplies(tmp_path):
    free, tied = shape_of(tmp_path), shape_of(tmp_path, tie_word_embeddings=True)
    assert total_params(free) - total_params(tied) == 256 * 64
    assert model_linears(free) == model_linears(tied)


def test_biases_count(tmp_path):
    plain = total_params(shape_of(tmp_path))
    # Per layer: q 64, k 32, v 32 (and o 64; gate 128, up 128, down 64).
    assert total_params(shape_of(tmp_path, model_type="qwen2")) - plain == 2 * 128
    assert total_params(shape_of(tmp_path, attention_bias=True)) - plain == 2 * 192
    assert total_params(shape_of(tmp_path, mlp_bias=True)) - plain == 2 * 320
    # Qwen3 normalises queries and keys over the 16 channels of a head.
    assert total_params(shape_of(tmp_path, model_type="qwen3")) - plain == 2 * 32


def test_a_token_of_the_hybrid_model_meets_six_experts():
    linears = model_linears(read_shape(MODELS / "nemotron-3-nano-30b-a3b.json"))
    active = dict.fromkeys(("mamba", "moe", "attention", "head", "router"), 0)
    for linear in linears:
        kind = {"mamba_in": "mamba", "mamba_out": "mamba", "experts": "moe", "shared": "moe"}.get(
            linear.kind, "attention"
        )
        active[linear.kind if linear.kind in ("head", "router") else kind] += linear.active_params
    assert active == {
        "mamba": 23 * (2688 * 10304 + 4096 * 2688),
        "moe": 23 * (6 * 2 * 2688 * 1856 + 2 * 2688 * 3712),
        "attention": 6 * 2688 * (2 * 4096 + 2 * 256),
        "head": 2688 * 131072,
        "router": 23 * 2688 * 128,
    }
    assert sum(active.values()) - active["router"] == 3_218_890_752
    routed = sum(linear.params for linear in linears if linear.kind == "experts")
    assert routed == 23 * 128 * 2 * 2688 * 1856  # 29.37 billion
