# SPDX-License-Identifier: Apache-2.0
"""What is refused before a GPU is asked for."""

from __future__ import annotations

import json

import pytest

from lora_suite.blueprint import preflight
from lora_suite.config import ConfigError, load_recipe
from tests.blueprint.helpers import T2
from tests.config.helpers import MEGATRON, RECIPES, SFT, TINY, TINY_LORA, TINY_MEGATRON, child

TP = "policy.megatron_cfg.tensor_model_parallel_size"
PP = "policy.megatron_cfg.pipeline_model_parallel_size"


def check(path, *overrides):
    return preflight(load_recipe(path, overrides).recipe, path)


def refusal(path, *overrides):
    resolved = load_recipe(path, overrides)
    with pytest.raises(ConfigError) as caught:
        preflight(resolved.recipe, path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def model(folder, **changes):
    """Write T2 with changes and return the override that names it."""
    path = folder / "model.json"
    path.write_text(json.dumps({**T2, "vocab_size": 320, **changes}))
    return f"policy.model_name={path}"


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 4, f"{TP} is 4, which does not divide the model's key/value heads, 2"),
        ({"num_attention_heads": 3, "num_key_value_heads": 4}, 2, "attention heads, 3"),
        ({"hidden_size": 63}, 2, "hidden channels, 63"),
        ({"intermediate_size": 129}, 2, "MLP channels, 129"),
        ({"vocab_size": 321}, 2, "vocabulary, 321"),
    ],
)
def test_tensor_parallel_sizes_must_divide(tmp_path, changes, size, message):
    overrides = [model(tmp_path, **changes), f"{TP}={size}", f"cluster.gpus_per_node={size}"]
    text = refusal(TINY_MEGATRON, *overrides)
    assert message in text
    assert len(text.splitlines()) == 1


def test_tensor_parallel_sizes_must_divide_on_dtensor_too():
    text = refusal(TINY, "policy.dtensor_cfg.tensor_parallel_size=4", "cluster.gpus_per_node=4")
    assert "policy.dtensor_cfg.tensor_parallel_size is 4, which does not divide" in text


def test_sequence_parallelism_splits_the_sequence():
    odd, any_length = "policy.max_total_sequence_length=63", "policy.make_sequence_length_divisible_by=1"
    parallel = "policy.megatron_cfg.sequence_parallel=true"
    check(TINY_MEGATRON, odd, any_length)
    assert "63, not a multiple of policy.make_sequence" in refusal(TINY_MEGATRON, odd, parallel)
    with pytest.raises(ConfigError, match="splits every sequence over 2 tensor parallel ranks"):
        load_recipe(TINY_MEGATRON, [odd, any_length, parallel])


@pytest.mark.parametrize("fused", ["true", "false"])
def test_an_exchange_needs_an_adapter_that_exchanges(fused):
    block = "policy.megatron_cfg.lora_cfg"
    words = [
        f"{block}.enabled=true",
        f"{block}.fused={fused}",
        f"{block}.a2a_experimental=true",
        "policy.megatron_cfg.sequence_parallel=true",
    ]
    assert check(TINY_MEGATRON, *words, f"{block}.target_modules=[linear_fc2]").adapters
    text = refusal(TINY_MEGATRON, *words, f"{block}.target_modules=[linear_qkv]")
    assert f"{block}.a2a_experimental: is about adapters of linear_proj and linear_fc2" in text


def test_experts_are_neither_split_nor_trained_and_only_megatron_builds_them():
    experts = "policy.model_name=models/tiny-qwen3-moe.json"
    lora = "policy.megatron_cfg.lora_cfg.enabled=true"
    assert check(TINY_MEGATRON, experts, f"{TP}=1", lora).trainable_params == 7_168
    assert f"{TP} is 2, but routed experts are not split; set 1" in refusal(TINY_MEGATRON, experts, lora)
    assert "only adapters are trained" in refusal(TINY_MEGATRON, experts, f"{TP}=1")
    assert "the dtensor backend does not build qwen3_moe models" in refusal(TINY_LORA, experts)


def test_pipeline_parallel_size_must_divide_the_layers():
    check(TINY_MEGATRON, f"{PP}=2", "cluster.gpus_per_node=4")
    text = refusal(TINY_MEGATRON, f"{PP}=3", f"{TP}=1", "cluster.gpus_per_node=3")
    assert f"{PP} is 3, which does not divide the model's layers, 2" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "policy.train_global_batch_size=12",
            "policy.train_global_batch_size is 12, which 2 data-parallel ranks",
        ),
        ("policy.train_micro_batch_size=3", "make it a multiple of 6"),
        ("sft.val_global_batch_size=4", "sft.val_global_batch_size is 4, which 2 data-parallel ranks"),
        ("cluster.gpus_per_node=3", "3 data-parallel ranks"),
        ("policy.max_total_sequence_length=513", "is 513, but the model has 512"),
        (
            "policy.make_sequence_length_divisible_by=7",
            "not a multiple of policy.make_sequence_length_divisible_by, 7",
        ),
        ("data.train.data_path=data/gone.jsonl", "data.train.data_path: there is no file data/gone.jsonl"),
        ("policy.model_name=models/tny-llama.json", "the nearest is models/tiny-llama.json"),
        ("policy.model_name=meta-llama/Lama-3.2-1B", "the nearest is meta-llama/Llama-3.2-1B"),
        ("policy.init=pretrained", "an architecture alone has no weights; set policy.init=random"),
    ],
)
def test_what_does_not_fit_is_refused(override, message):
    assert message in refusal(TINY, override)


def test_validation_batches_are_not_checked_without_validation():
    check(TINY, "sft.val_global_batch_size=4", "sft.val_period=0")


def test_all_problems_come_in_one_message():
    text = refusal(TINY, "policy.train_global_batch_size=12", "data.train.data_path=gone.jsonl")
    assert len(text.splitlines()) == 2


def test_an_unknown_family_is_refused(tmp_path):
    resolved = load_recipe(TINY, [model(tmp_path, model_type="gpt2")])
    with pytest.raises(ConfigError, match="model_type 'gpt2' is not known"):
        preflight(resolved.recipe, TINY)


def test_bytes_need_their_ids(tmp_path):
    assert "bytes needs 259 ids, but the model has 256" in refusal(TINY, model(tmp_path, vocab_size=256))


def test_the_megatron_backend_builds_no_hybrids():
    name = "policy.model_name=nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    text = refusal(SFT, *MEGATRON, name, "policy.init=random")
    assert "the megatron backend does not build nemotron_h models" in text


def test_targets_are_checked_with_their_key():
    text = refusal(TINY_LORA, "policy.dtensor_cfg.lora_cfg.target_modules=[q_prj]")
    assert "policy.dtensor_cfg.lora_cfg.target_modules: 'q_prj' matches no linear" in text


def test_a_hub_model_that_is_not_here_is_checked_as_far_as_can_be():
    facts = check(SFT, "policy.model_name=acme/Unheard-7B")
    assert facts.model is None
    assert facts.adapters == ()
    assert "cannot share" in refusal(
        SFT, "policy.model_name=acme/Unheard-7B", "policy.train_micro_batch_size=3"
    )
    assert "not on this machine" in refusal(SFT, "policy.model_name=acme/Unheard-7B", "policy.init=random")


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "gone.json"])
def test_a_path_that_is_not_there_is_no_hub_name(name):
    assert "not on this machine" in refusal(SFT, f"policy.model_name={name}")


def test_a_folder_with_config_is_a_pretrained_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((RECIPES / "models/tiny-llama.json").read_text())
    facts = check(
        TINY, f"policy.model_name={folder}", "policy.init=pretrained", "policy.tokenizer.name=bytes"
    )
    assert facts.total_params == 115_008


def test_a_recipe_elsewhere_finds_the_shipped_rows_and_models(tmp_path):
    path = child(tmp_path, "policy: {init: random}\n")
    assert preflight(load_recipe(path).recipe, path).total_params == 1_235_814_400


TINY_HYBRID = RECIPES / "sft-tiny-nemotron-h-1n2c-fsdp2-lora.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "tensor_parallel_size=2",
            "tensor_parallel_size is 2, but Mamba mixers and experts are not split; set 1",
        ),
        ("lora_cfg.implementation=peft", "PEFT puts no adapter beside out_proj of a Mamba mixer"),
        (
            "activation_checkpointing=selective",
            "is selective, which Mamba mixers and routed experts are not made for; set true or false",
        ),
    ],
)
def test_what_a_hybrid_model_does_not_have_is_refused(override, message):
    whole = [f"policy.dtensor_cfg.{key}" for key in ("lora_cfg.experts=off", "expert_parallel_size=1")]
    text = refusal(TINY_HYBRID, f"policy.dtensor_cfg.{override}", *whole)
    assert message in text


def test_products_are_recomputed_of_layers_that_recompute():
    layers = "policy.dtensor_cfg.recompute_mlp_layers"
    text = refusal(TINY_LORA, f"{layers}=1")
    assert f"{layers} is 1, which needs activation_checkpointing: selective; set that, or 0" in text
    some = "policy.dtensor_cfg.activation_checkpointing=selective"
    assert f"{layers} is 3, but the model has 2 layers; set at most 2" in refusal(
        TINY_LORA, some, f"{layers}=3"
    )
    check(TINY_LORA, some, f"{layers}=2")


def test_experts_are_split_evenly_and_only_where_there_are_any():
    three = ["cluster.gpus_per_node=3", "policy.train_global_batch_size=12", "sft.val_global_batch_size=12"]
    text = refusal(TINY_HYBRID, *three, "policy.dtensor_cfg.expert_parallel_size=3")
    assert "expert_parallel_size is 3, which does not divide the model's experts, 8" in text
    text = refusal(TINY_LORA, "policy.dtensor_cfg.expert_parallel_size=2")
    assert "expert_parallel_size is 2, but the model has no experts; set 1" in text
    text = refusal(TINY_LORA, "policy.dtensor_cfg.lora_cfg.experts=shared")
    assert "experts is shared, but the model has no experts; set off" in text
