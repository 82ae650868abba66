# SPDX-License-Identifier: Apache-2.0
"""Types after the merge, and what an error tells to write instead."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_suite.config.layers import read_layers
from lora_suite.config.overrides import apply_overrides
from lora_suite.config.schema import Recipe
from tests.config.helpers import SFT, child, load, refusal

LORA = "policy.dtensor_cfg.lora_cfg"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{LORA}.dim=8.0", "must be a whole number, not 8.0; write 8"),
        (f"{LORA}.dim=8.5", "must be a whole number, not 8.5"),
        (f"{LORA}.dim=True", "must be a whole number, not true"),
        (f"{LORA}.dim='8'", 'must be a whole number, not "8"; write 8, without quotes'),
        (f"{LORA}.dim=abc", 'must be a whole number, not "abc"'),
        (f"{LORA}.dim=null", "must be a whole number, not null"),
        (f"{LORA}.dim=0", "dim is 0: input should be greater than or equal to 1"),
        (f"{LORA}.alpha=true", "must be a number, not true"),
        (f"{LORA}.alpha='16'", 'must be a number, not "16"; write 16, without quotes'),
        (f"{LORA}.enabled='true'", 'must be true or false, not "true"; write true, without quotes'),
        (f"{LORA}.enabled=no", 'must be true or false, not "no"; write false, without quotes'),
        (f"{LORA}.enabled=1", "must be true or false, not 1"),
        (
            "policy.dtensor_cfg.activation_checkpointing=selectiv",
            "is \"selectiv\", but must be false, 'selective' or true; the nearest is selective",
        ),
        ("policy.dtensor_cfg.activation_checkpointing=1", "but must be false, 'selective' or true"),
        (
            "policy.dtensor_cfg.activation_checkpointing=null",
            "is null, but must be false, 'selective' or true",
        ),
        ("policy.dtensor_cfg.activation_checkpointing=[full]", 'is ["full"], but must be false, \'selective'),
        (f"{LORA}.dropout=1.0", "dropout is 1.0: input should be less than 1"),
        (f"{LORA}.target_modules=q_proj", 'must be a list, not "q_proj"'),
        (f"{LORA}.target_modules=[1]", 'must be a text, not 1; write "1" in quotes'),
        (f"{LORA}.lora_dtype=None", "lora_dtype is the text 'None'; write null"),
        (f"{LORA}.match_all_linear=None", "match_all_linear is the text 'None'; write null"),
        ("checkpointing.metric_name=None", "metric_name is the text 'None'; write null"),
        ("policy.model_name=None", "policy.model_name is the text 'None'; write null"),
        (f"{LORA}.lora_A_init=xaviar", "must be 'xavier', 'uniform' or 'kaiming'; the nearest is xavier"),
        ("policy.optimizer.name=torch.optim.adamw", "the nearest is torch.optim.AdamW"),
        ("policy.precision=bf16", "must be 'bfloat16', 'float32' or 'float64'; the nearest is bfloat16"),
        ("policy.optimizer.kwargs.lr=nan", "input should be a finite number"),
        ("policy.optimizer.kwargs.lr=inf", "input should be a finite number"),
        ("policy.optimizer.kwargs.betas=[0.9]", "betas is [0.9], which lacks a value"),
        ("policy.optimizer.kwargs.betas=[0.9,0.9,0.9]", "at most 2 items"),
        ("policy=null", "policy must be a block of keys, not null"),
        ("debug.faults.kill_rank_at=1", "must be a text, not 1"),
        ("debug.faults.kill_rank_at=a:b", "kill_rank_at"),
        ("debug.faults.out_of_memory_at=a:b", "out_of_memory_at"),
        ("+policy.dtensor_cfg.env_vars.X=1", 'env_vars.X must be a text, not 1; write "1" in quotes'),
    ],
)
def test_errors_say_what_to_write(override, message):
    text = refusal(SFT, [override])
    assert message in text
    assert f"override {override!r}: " in text


@pytest.mark.parametrize(
    ("text", "value"),
    [("none", False), ("false", False), ("selective", "selective"), ("full", True), ("true", True)],
)
def test_names_of_recomputation(text, value):
    found = load(f"policy.dtensor_cfg.activation_checkpointing={text}").recipe.policy.dtensor_cfg
    assert found.activation_checkpointing is value or found.activation_checkpointing == value == "selective"


def test_none_in_a_free_form_block_is_a_text():
    resolved = load("+policy.dtensor_cfg.env_vars.MODE=None")
    assert resolved.recipe.policy.dtensor_cfg.env_vars == {"MODE": "None"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "policy: {dtensor_cfg: {lora_cfg: {dimm: 128}}}",
            f"unknown key {LORA}.dimm; the nearest is {LORA}.dim",
        ),
        ("policy: {megatron_cfg: {peft: {lora_dtype: None}}}", "lora_cfg.lora_dtype is the text 'None'"),
        ("sft: {max_steps: 3}", "unknown key sft.max_steps; the nearest is sft.max_num_steps"),
        ("policy: {dtensor_cfg: {v2: true}}", "the nearest is policy.dtensor_cfg._v2"),
        ("cluster: {zzz: 1}", "unknown key cluster.zzz; cluster has gpus_per_node, num_nodes"),
        ("polcy: {}", "unknown key polcy; the nearest is policy"),
        ("sft: {seed: 010x}", "sft.seed must be a whole number"),
        ("sft: {seed: !!binary aGk=}", "not valid YAML"),
        ("policy: {optimizer: {kwargs: {lr: '1e-5'}}}", 'not "1e-5"; write 1e-5, without quotes'),
    ],
)
def test_yaml_is_as_strict_as_overrides_and_names_the_line(tmp_path, text, message):
    path = child(tmp_path, text + "\n")
    report = refusal(path)
    assert message in report
    assert f"{path}:2: " in report


def test_all_problems_are_reported_at_once():
    text = refusal(SFT, [f"{LORA}.dim=abc", "sft.seed=x"])
    assert len(text.splitlines()) == 2


def test_a_recipe_without_the_defaults_is_told_so(tmp_path):
    path = tmp_path / "alone.yaml"
    path.write_text("sft: {seed: 1}\n")
    assert "cluster is required and not set (does the recipe inherit from sft.yaml?)" in refusal(path)


def test_whole_numbers_become_floats_and_lists_become_tuples():
    kwargs = load(
        "policy.optimizer.kwargs.lr=1", "policy.optimizer.kwargs.betas=[0,0.5]"
    ).recipe.policy.optimizer.kwargs
    assert kwargs.lr == 1.0
    assert isinstance(kwargs.lr, float)
    assert kwargs.betas == (0.0, 0.5)


def _forms(value: float) -> list[str]:
    """Ways to write one number."""
    return [
        repr(value),
        f"{value:.17e}",
        f"{value:.17E}".replace("E-0", "E-").replace("E+0", "E+"),
        json.dumps(value),
    ]


@settings(max_examples=40, deadline=None)
@given(value=st.floats(min_value=1e-12, max_value=1e6))
def test_a_number_is_the_same_on_every_route(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("route")
    path = folder / "a.yaml"
    for form in _forms(value):
        path.write_text(f"lr: {form}\n")
        layered = read_layers(path)
        assert layered.tree == {"lr": value}
        apply_overrides(layered, ["lr=0", f"lr={form}"])
        assert layered.tree == {"lr": value}


@pytest.mark.parametrize("form", ["1e-5", "1E-5", "1.0e-05", "0.00001", "1.e-5"])
def test_one_hundred_thousandth_however_it_is_written(tmp_path, form):
    path = child(tmp_path, f"policy: {{optimizer: {{kwargs: {{lr: {form}}}}}}}\n")
    assert load(path=path).recipe.policy.optimizer.kwargs.lr == 0.00001
    assert load(f"policy.optimizer.kwargs.lr={form}").recipe.policy.optimizer.kwargs.lr == 0.00001


def test_a_recipe_cannot_be_changed():
    recipe: Recipe = load().recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.sft.seed = 3
