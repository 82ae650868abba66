# SPDX-License-Identifier: Apache-2.0
"""The mapping of names and shards, against layouts written down by hand."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from lora_suite.blueprint.shape import ModelShape
from lora_suite.config.errors import ConfigError
from lora_suite.train.backends.megatron.weights import ShardMap, stored
from lora_suite.train.topology import Axis

# Two groups of two query heads; heads of two channels. Each row of a weight holds one number of its own.
SHAPE = ModelShape(
    family="llama",
    layers=2,
    hidden=3,
    heads=4,
    kv_heads=2,
    head_dim=2,
    intermediate=4,
    vocab=6,
    tied_head=False,
    qk_norm=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    max_positions=16,
)


def numbered(first: int, rows: int) -> torch.Tensor:
    return torch.arange(first, first + rows, dtype=torch.float32)[:, None].expand(rows, 3).contiguous()


TENSORS = {
    "model.layers.1.self_attn.q_proj.weight": numbered(0, 8),
    "model.layers.1.self_attn.k_proj.weight": numbered(100, 4),
    "model.layers.1.self_attn.v_proj.weight": numbered(200, 4),
    "model.layers.1.self_attn.q_proj.bias": torch.arange(0.0, 8.0),
    "model.layers.1.self_attn.k_proj.bias": torch.arange(100.0, 104.0),
    "model.layers.1.self_attn.v_proj.bias": torch.arange(200.0, 204.0),
    "model.layers.1.mlp.gate_proj.weight": numbered(0, 4),
    "model.layers.1.mlp.up_proj.weight": numbered(100, 4),
    "model.layers.1.mlp.down_proj.weight": torch.arange(12.0).view(3, 4),
    "model.layers.1.post_attention_layernorm.weight": torch.arange(3.0),
    "model.embed_tokens.weight": numbered(0, 6),
    "lm_head.weight": numbered(10, 6),
}
LAYER = "decoder.layers.0."  # of the second of two stages, so layer 1 of the model


def local(name: str, tp_index: int, tp_size: int, shape: ModelShape = SHAPE) -> torch.Tensor:
    return ShardMap(shape, Axis(tp_index, tp_size)).local(name, 1, TENSORS.__getitem__)


@pytest.mark.parametrize(
    ("index", "size", "rows"),
    [
        (0, 1, [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]),
        (0, 2, [0, 1, 2, 3, 100, 101, 200, 201]),
        (1, 2, [4, 5, 6, 7, 102, 103, 202, 203]),
    ],
)
def test_queries_keys_values_alternate_by_group_of_heads(index, size, rows):
    assert local(f"{LAYER}self_attention.linear_qkv.weight", index, size)[:, 0].tolist() == rows
    assert local(f"{LAYER}self_attention.linear_qkv.bias", index, size).tolist() == rows


@pytest.mark.parametrize(
    ("index", "size", "rows"),
    [(0, 1, [0, 1, 2, 3, 100, 101, 102, 103]), (0, 2, [0, 1, 100, 101]), (1, 2, [2, 3, 102, 103])],
)
def test_a_rank_holds_its_rows_of_gate_then_of_up(index, size, rows):
    assert local(f"{LAYER}mlp.linear_fc1.weight", index, size)[:, 0].tolist() == rows


def test_row_parallel_weights_are_split_by_columns_and_norms_not_at_all():
    assert local(f"{LAYER}mlp.linear_fc2.weight", 1, 2).tolist() == [[2, 3], [6, 7], [10, 11]]
    assert local(f"{LAYER}pre_mlp_layernorm.weight", 1, 2).tolist() == [0, 1, 2]


def test_the_head_is_the_embedding_only_where_it_is_tied():
    tied = ModelShape(**{**vars(SHAPE), "tied_head": True})
    assert local("embedding.word_embeddings.weight", 1, 2)[:, 0].tolist() == [3, 4, 5]
    assert local("output_layer.weight", 1, 2)[:, 0].tolist() == [13, 14, 15]
    assert local("output_layer.weight", 1, 2, tied)[:, 0].tolist() == [3, 4, 5]


def test_a_name_without_a_counterpart_is_an_error():
    with pytest.raises(KeyError, match=r"decoder\.mystery"):
        local("decoder.mystery.weight", 0, 1)


def test_reads_one_file_or_several_with_an_index(tmp_path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    whole.mkdir()
    split.mkdir()
    first, second = {"a": torch.tensor([1.0])}, {"b": torch.tensor([2.0])}
    save_file({**first, **second}, whole / "model.safetensors")
    save_file(first, split / "model-1.safetensors")
    save_file(second, split / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in (whole, split):
        assert [stored(folder)(name).item() for name in "ab"] == [1.0, 2.0]
    with pytest.raises(ConfigError, match="has no tensor c"):
        stored(whole)("c")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        stored(tmp_path)
