# SPDX-License-Identifier: Apache-2.0
"""The same counts and names as the libraries that build the models and adapters."""

from __future__ import annotations

import json

import pytest

from lora_suite.blueprint import model_linears, read_shape, select_sites, total_params
from tests.blueprint.helpers import MODELS, T2, dtensor

pytestmark = pytest.mark.slow
VARIANTS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "llama without head_dim": {"head_dim": None, "num_key_value_heads": None},
    "hybrid": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-E*",
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "use_conv_bias": False,
        "use_bias": True,
        "mlp_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "qwen3 without head_dim": {"model_type": "qwen3", "head_dim": None, "attention_bias": True},
}


def build(config):
    """Build a model without memory, from its configuration."""
    import torch
    import transformers

    settings = {key: value for key, value in config.items() if value is not None}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))


def linear_names(built):
    import torch

    return {
        name: (module.in_features, module.out_features)
        for name, module in built.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def plain_linears(shape):
    """Return our linears less those that transformers keeps as bare tensors."""
    return {
        linear.name: (linear.in_features, linear.out_features)
        for linear in model_linears(shape)
        if linear.kind not in ("experts", "router")
    }


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_families_have_the_parameters_and_linears_that_transformers_builds(tmp_path, changes):
    config = {**T2, **changes}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    shape, built = read_shape(path), build(config)
    assert total_params(shape) == sum(parameter.numel() for parameter in built.parameters())
    assert plain_linears(shape) == linear_names(built)


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_architectures_build_with_the_counted_parameters(path):
    built = build(json.loads(path.read_text()))
    shape = read_shape(path)
    assert total_params(shape) == sum(parameter.numel() for parameter in built.parameters())
    assert plain_linears(shape) == linear_names(built)


def test_peft_adapts_the_same_linears_with_as_many_parameters():
    import peft

    path = MODELS / "tiny-llama.json"
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build(json.loads(path.read_text())), config)
    names = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A")
        for name, module in adapted.named_modules()
        if name.endswith(".lora_A")
    }
    sites = select_sites(model_linears(read_shape(path)), dtensor(), False, "here")
    assert {site.name for site in sites} == names
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert sum(site.params(8) for site in sites) == trainable == 16_384
