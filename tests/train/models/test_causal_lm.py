# SPDX-License-Identifier: Apache-2.0
"""A model made real part by part computes what transformers' own does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lora_suite.config import ConfigError, load_recipe
from lora_suite.train.models.causal_lm import (
    build_on_meta,
    load_config,
    materialise,
    materialise_buffers,
    weight_source,
)
from lora_suite.train.models.initialise import Weight, draw

RECIPES = Path(__file__).parents[3] / "recipes"
DEFAULTS = RECIPES / "sft.yaml"
CPU = torch.device("cpu")
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def small(tmp_path):
    """A JSON of Llama-3.2's architecture, rotary scaling and tied head included, with small sizes."""
    keys = json.loads((RECIPES / "models" / "llama-3.2-1b.json").read_text())
    keys |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "_name_or_path": "none/none"}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(keys))
    return path


def recipe_of(name, init="random", precision="float32"):
    overrides = [f"policy.model_name={name}", f"policy.init={init}", f"policy.precision={precision}"]
    return load_recipe(DEFAULTS, overrides).recipe


def made_by_us(recipe, dtype=torch.float32):
    config = load_config(recipe, DEFAULTS)
    model = build_on_meta(config, dtype)
    materialise_buffers(model, CPU)
    materialise(model, "", weight_source(recipe, DEFAULTS, config, CPU), CPU)
    return model


def made_by_transformers(path, seed):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(Weight(name, tuple(parameter.shape)), 0.02, seed, torch.float32, CPU))
    return model


def test_random_weights_give_the_plain_models_logits(small):
    recipe = recipe_of(small)
    ours, plain = made_by_us(recipe), made_by_transformers(small, recipe.sft.seed)
    assert not any(tensor.is_meta for tensor in [*ours.parameters(), *ours.buffers()])
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert ours.model.rotary_emb.rope_type == "llama3"
    torch.testing.assert_close(ours(IDS).logits, plain(IDS).logits, rtol=0, atol=0)


def test_dtypes_are_the_recipes_for_weights_and_float32_for_rotary_frequencies(small):
    model = made_by_us(recipe_of(small), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert model.state_dict().keys() == made_by_transformers(small, 0).state_dict().keys()


def test_pretrained_weights_come_from_the_folder(small, tmp_path):
    saved = made_by_transformers(small, 99)
    saved.save_pretrained(tmp_path / "saved")
    ours = made_by_us(recipe_of(tmp_path / "saved", "pretrained"))
    torch.testing.assert_close(ours(IDS).logits, saved(IDS).logits, rtol=0, atol=0)


def test_a_folder_without_weights_is_named(small, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text(small.read_text())
    recipe = recipe_of(folder, "pretrained")
    with pytest.raises(ConfigError, match=r"policy\.model_name.*empty: no weights"):
        weight_source(recipe, DEFAULTS, load_config(recipe, DEFAULTS), CPU)


def test_an_unusable_configuration_is_named(tmp_path):
    path = tmp_path / "odd.json"
    path.write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match=r"policy\.model_name.*odd\.json: no configuration"):
        load_config(recipe_of(path), DEFAULTS)


def test_a_sliding_window_is_refused(tmp_path):
    keys = json.loads((RECIPES / "models" / "qwen3-0.6b.json").read_text())
    keys |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    path = tmp_path / "windows.json"
    path.write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match=r"policy\.model_name.*windows\.json.*sliding window"):
        load_config(recipe_of(path), DEFAULTS)


def test_what_is_real_already_is_left_alone(small):
    recipe = recipe_of(small)
    config = load_config(recipe, DEFAULTS)
    model = build_on_meta(config, torch.float32)
    flat = torch.full((64,), 7.0)
    model.model.norm.weight = nn.Parameter(flat.view(64))
    materialise(model, "", weight_source(recipe, DEFAULTS, config, CPU), CPU)
    assert model.model.norm.weight.data_ptr() == flat.data_ptr()
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_frozen_parameters_stay_frozen_and_shared_ones_shared():
    linear = nn.Linear(3, 2, bias=True, device="meta")
    model = nn.ModuleDict({"one": linear, "two": nn.Linear(3, 2, device="meta")})
    model["two"].weight = linear.weight
    linear.bias.requires_grad_(False)
    asked = []

    def source(weight):
        asked.append(weight.name)
        return torch.ones(weight.shape)

    materialise(model, "m", source, CPU)
    assert asked == ["m.one.weight", "m.one.bias", "m.two.bias"]
    assert model["two"].weight is model["one"].weight
    assert not model["one"].bias.requires_grad
    assert model["one"].weight.requires_grad


def test_buffers_that_transformers_would_not_fill_are_refused(small):
    model = build_on_meta(load_config(recipe_of(small), DEFAULTS), torch.float32)
    model.model.register_module("odd", nn.Module())
    model.model.odd.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"model\.odd: transformers does not fill the buffers table"):
        materialise_buffers(model, CPU)


def test_float32_masters_start_at_the_bfloat16_values_that_the_other_backend_holds(small):
    model = made_by_us(recipe_of(small, precision="bfloat16"), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        stored = draw(Weight(name, tuple(parameter.shape)), 0.02, 42, torch.bfloat16, CPU)
        assert torch.equal(parameter, stored.float())
