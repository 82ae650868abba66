# SPDX-License-Identifier: Apache-2.0
"""One initialisation for every backend: it depends on (seed, name) alone."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from lora_suite.blueprint.shape import read_shape
from lora_suite.train.models.initialise import Weight, draw, hf_tensors, llama_weights

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
QWEN2 = {**TINY, "model_type": "qwen2"}
QWEN3 = {**TINY, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
QWEN3_MOE = {
    **TINY,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
BIASED = {**TINY, "attention_bias": True, "mlp_bias": True}


@pytest.fixture
def shape_of(tmp_path):
    """A function from an architecture's keys to its shape."""

    def read(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return read_shape(path)

    return read


@pytest.mark.parametrize("config", [TINY, QWEN2, QWEN3, BIASED], ids=["llama", "qwen2", "qwen3", "biased"])
def test_lists_what_transformers_builds(config, shape_of):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {weight.name: weight.shape for weight in llama_weights(shape_of(config))} == built


def test_experts_are_listed_one_by_one_as_transformers_saves_them(tmp_path):
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {key: value for key, value in QWEN3_MOE.items() if key != "model_type"}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    listed = llama_weights(read_shape(tmp_path / "config.json"))
    assert {weight.name: weight.shape for weight in listed} == {
        name: tuple(value.shape) for name, value in saved.items()
    }


def test_counts_parameters_as_by_hand(shape_of):
    # Embedding and head 2·256·64; a layer q 64·64, k and v 32·64, o 64·64, mlp 3·64·128, two norms of 64.
    layer = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64
    total = sum(math.prod(weight.shape) for weight in llama_weights(shape_of(TINY)))
    assert total == 2 * 256 * 64 + 2 * layer + 64


def test_begins_with_ones_zeros_and_the_given_spread(shape_of):
    tensors = dict(hf_tensors(shape_of(BIASED), 0.05, 1, torch.float32, "cpu"))
    assert torch.equal(tensors["model.norm.weight"], torch.ones(64))
    assert torch.equal(tensors["model.layers.1.mlp.down_proj.bias"], torch.zeros(64))
    head = tensors["lm_head.weight"]
    assert head.std().item() == pytest.approx(0.05, rel=0.03)
    assert abs(head.mean().item()) < 4 * 0.05 / math.sqrt(head.numel())


def test_depends_on_seed_and_name_alone():
    weight = Weight("model.layers.0.mlp.up_proj.weight", (128, 64))
    torch.manual_seed(1)
    first = draw(weight, 0.02, 7, torch.float32, "cpu")
    torch.manual_seed(2)
    assert torch.equal(first, draw(weight, 0.02, 7, torch.float32, "cpu"))
    assert not torch.equal(first, draw(weight, 0.02, 8, torch.float32, "cpu"))
    other = Weight("model.layers.1.mlp.up_proj.weight", (128, 64))
    assert not torch.equal(first, draw(other, 0.02, 7, torch.float32, "cpu"))
    assert torch.equal(first.bfloat16(), draw(weight, 0.02, 7, torch.bfloat16, "cpu"))
    assert torch.equal(first.double(), draw(weight, 0.02, 7, torch.float64, "cpu"))


def test_refuses_a_tensor_without_a_rule():
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mixer\.gamma"):
        draw(Weight("model.layers.0.mixer.gamma", (64,)), 0.02, 1, torch.float32, "cpu")


def mixer(name, *shape):
    return draw(Weight(f"model.layers.0.mixer.{name}", shape), 0.02, 1, torch.float64, "cpu")


def test_a_mamba_mixer_starts_as_its_paper_says():
    """Decays 1, 2, 3, …; time steps between 0.001 and 0.1, even on a logarithmic scale; a plain skip."""
    torch.testing.assert_close(
        mixer("A_log", 4).exp(), torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), rtol=1e-6, atol=0
    )
    assert mixer("D", 4).tolist() == [1.0] * 4
    steps = torch.nn.functional.softplus(mixer("dt_bias", 4096))
    assert 0.999e-3 < float(steps.min()) < 1.1e-3
    assert 0.09 < float(steps.max()) < 0.1001
    assert float(steps.log().mean()) == pytest.approx(math.log(1e-2), abs=0.1)


def test_a_convolution_starts_like_torchs_and_experts_like_linears():
    """torch: uniform within 1/√(channels of a group · width), so a standard deviation of 0.5/√3."""
    convolution = mixer("conv1d.weight", 4096, 1, 4)
    assert float(convolution.abs().max()) <= 0.5
    assert float(convolution.std()) == pytest.approx(0.5 / math.sqrt(3), rel=0.02)
    assert mixer("conv1d.bias", 4096).abs().max() == 0.0
    assert float(mixer("experts.up_proj", 8, 64, 64).std()) == pytest.approx(0.02, rel=0.02)
    assert mixer("gate.e_score_correction_bias", 8).abs().max() == 0.0


def test_refuses_a_hybrid_model(shape_of):
    hybrid = dataclasses.replace(shape_of(TINY), family="nemotron_h", hybrid=object())
    with pytest.raises(ValueError, match="nemotron_h"):
        llama_weights(hybrid)
