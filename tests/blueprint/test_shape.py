# SPDX-License-Identifier: Apache-2.0
"""Shapes read from model files."""

from __future__ import annotations

import json

import pytest

from lora_suite.blueprint import read_shape
from lora_suite.blueprint.shape import MoeShape
from lora_suite.config.errors import ConfigError
from tests.blueprint.helpers import MODELS, T2, shape_of


def test_a_llama_is_read_as_it_says(tmp_path):
    shape = shape_of(tmp_path)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.vocab) == (2, 64, 128, 256)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 16)
    flags = (shape.tied_head, shape.qk_norm, shape.qkv_bias, shape.o_bias, shape.mlp_bias)
    assert not any(flags)
    assert shape.hybrid is None
    assert shape.attention_layers == 2


@pytest.mark.parametrize(
    ("family", "qk_norm", "qkv_bias", "o_bias"),
    [("llama", False, False, False), ("qwen2", False, True, False), ("qwen3", True, False, False)],
)
def test_families_differ_in_norms_and_biases(tmp_path, family, qk_norm, qkv_bias, o_bias):
    shape = shape_of(tmp_path, model_type=family)
    assert (shape.qk_norm, shape.qkv_bias, shape.o_bias) == (qk_norm, qkv_bias, o_bias)


def test_attention_bias_is_on_all_four_projections_but_for_qwen2(tmp_path):
    assert shape_of(tmp_path, attention_bias=True).o_bias is True
    assert shape_of(tmp_path, attention_bias=True).qkv_bias is True
    assert shape_of(tmp_path, model_type="qwen2", attention_bias=True).o_bias is False


def test_defaults_are_those_of_transformers(tmp_path):
    assert shape_of(tmp_path, head_dim=None).head_dim == 16
    assert shape_of(tmp_path, head_dim=None, model_type="qwen3").head_dim == 128
    assert shape_of(tmp_path, num_key_value_heads=None).kv_heads == 4
    assert shape_of(tmp_path, tie_word_embeddings=None).tied_head is False


def test_the_hybrid_model_has_its_three_kinds_of_layer():
    shape = read_shape(MODELS / "nemotron-3-nano-30b-a3b.json")
    assert shape.hybrid is not None
    kinds = [shape.hybrid.pattern.count(kind) for kind in ("mamba", "moe", "attention", "mlp")]
    assert kinds == [23, 23, 6, 0]
    assert shape.attention_layers == 6
    assert (shape.hybrid.experts, shape.hybrid.experts_per_token) == (128, 6)


def test_experts_stand_in_place_of_every_mlp(tmp_path):
    shape = read_shape(MODELS / "tiny-qwen3-moe.json")
    assert shape.moe == MoeShape(experts=8, active=2, intermediate=32)
    assert shape.qk_norm
    # What transformers writes when it saves a model.
    saved = shape_of(
        tmp_path,
        model_type="qwen3_moe",
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[],
    )
    assert saved.moe == shape.moe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen"},
            "model_type 'qwen' is not known; known are llama, qwen2, qwen3, qwen3_moe, nemotron_h "
            "(the nearest is qwen",
        ),
        ({"model_type": None}, "model_type None is not known"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 on, not 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number from 1 on, not '2'"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern is missing"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MEX"},
            "hybrid_override_pattern must have 2 letters",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "out of M * - E"),
        ({"model_type": "qwen3_moe"}, "num_experts is missing"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "only models with experts in every layer"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "only models with experts in every layer"),
    ],
)
def test_bad_files_name_file_and_key(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        shape_of(tmp_path, **changes)
    assert message in str(caught.value)
    assert str(tmp_path / "model.json") in str(caught.value)


def test_unknown_keys_are_the_models_own_business(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**T2, "rope_theta": 1.0, "transformers_version": "5"}))
    assert read_shape(path).layers == 2
