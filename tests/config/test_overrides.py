# SPDX-License-Identifier: Apache-2.0
"""Overrides in hydra's grammar."""

from __future__ import annotations

import pytest

from tests.config.helpers import MEGATRON, SFT, child, load, refusal

LORA = "policy.dtensor_cfg.lora_cfg"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("sft.seed=7", "sft.seed", 7),
        ("policy.optimizer.kwargs.lr=1e-5", "policy.optimizer.kwargs.lr", 0.00001),
        ("policy.optimizer.kwargs.lr=1", "policy.optimizer.kwargs.lr", 1.0),
        (f"{LORA}.enabled=True", f"{LORA}.enabled", True),
        (f"{LORA}.target_modules=[q_proj, v_proj]", f"{LORA}.target_modules", ["q_proj", "v_proj"]),
        (f"{LORA}.target_modules=['*.q_proj']", f"{LORA}.target_modules", ["*.q_proj"]),
        ("policy.model_name='a=b, ~c'", "policy.model_name", "a=b, ~c"),
        ('policy.model_name="x y"', "policy.model_name", "x y"),
        ("checkpointing.keep_top_k=null", "checkpointing.keep_top_k", None),
        ("++sft.seed=9", "sft.seed", 9),
        (
            "+policy.dtensor_cfg.env_vars.NCCL_DEBUG=INFO",
            "policy.dtensor_cfg.env_vars",
            {"NCCL_DEBUG": "INFO"},
        ),
        (
            "+policy.dtensor_cfg.automodel_kwargs.force_hf=true",
            "policy.dtensor_cfg.automodel_kwargs",
            {"force_hf": True},
        ),
        ("sft.val_batches=${sft.val_period}", "sft.val_batches", 10),
        ("policy.optimizer.kwargs.betas.1=0.95", "policy.optimizer.kwargs.betas", [0.9, 0.95]),
        ("logger.wandb={project: p}", "logger.wandb", {"project": "p", "name": "sft-dev"}),
    ],
)
def test_values_have_the_types_of_the_grammar(override, key, value):
    node = load(override).tree
    for part in key.split("."):
        node = node[part]
    assert node == value
    assert type(node) is type(value)


def test_overrides_apply_in_order():
    assert load("sft.seed=1", "sft.seed=2").recipe.sft.seed == 2


def test_deleting_an_optional_key_leaves_its_type_default():
    resolved = load("~policy.tokenizer.chat_template")
    assert resolved.recipe.policy.tokenizer.chat_template == "default"
    assert resolved.origin("policy.tokenizer.chat_template") != ""


def test_a_deleted_key_can_be_added_again():
    resolved = load("~policy.tokenizer.chat_template", "+policy.tokenizer.chat_template=null")
    assert resolved.recipe.policy.tokenizer.chat_template is None


def test_delete_with_a_value_asks_for_that_value():
    assert load("~data.train.input_key=input").recipe.data.train.input_key == "input"
    assert "data.train.input_key is 'input', so it is not deleted" in refusal(
        SFT, ["~data.train.input_key=x"]
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{LORA}.dimm=16", f"no key {LORA}.dimm; the nearest is {LORA}.dim"),
        ("policy.lora_cfg.dim=16", "the nearest is policy.dtensor_cfg.lora_cfg.dim"),
        ("sft.max_step=3", "the nearest is sft.max_num_steps"),
        ("~sft.sed", "no key sft.sed; the nearest is sft.seed"),
        ("~policy.tokenizer.chat_template=x", "is None, so it is not deleted"),
        ("+sft.seed=3", "sft.seed is there already (42); write sft.seed=3"),
        ("policy.dtensor_cfg.env_vars.X=1", "+policy.dtensor_cfg.env_vars.X=… adds it"),
        ("sft.seed=1,2", "several values (a sweep) for sft.seed"),
        ("sft.seed=range(1,3)", "several values (a sweep)"),
        ("sft.seed=choice(1,2)", "several values (a sweep)"),
        (
            "policy.model_name=~/m",
            "starts with a tilde; quote it inside the word: \"policy.model_name='~/m'\"",
        ),
        ("policy.model_name=/a/b=c", "quote it inside the word: \"policy.model_name='/a/b=c'\""),
        ("sft.seed", "write KEY=VALUE"),
        ("--repeats", "not an option of the command"),
        ("++sft.seed.x=1", "sft.seed"),
        ("sft seed=1", "is not words joined by dots"),
        ("sft/seed=1", "keys are words joined by dots"),
        ("sft@x=1", "keys are words joined by dots"),
        ("~policy.optimizer.kwargs.betas.0", "an item of a list cannot be deleted"),
        ("+policy.optimizer.kwargs.betas.x=1", "betas"),
    ],
)
def test_bad_overrides_say_what_to_write(override, message):
    text = refusal(SFT, [override])
    assert message in text
    assert repr(override) in text


def test_a_key_cannot_be_deleted_twice():
    text = refusal(SFT, ["~policy.tokenizer.chat_template", "~policy.tokenizer.chat_template"])
    assert "does not set policy.tokenizer.chat_template" in text


def test_deleting_a_required_key_names_the_override():
    assert "sft.seed is required, but override '~sft.seed' deleted it" in refusal(SFT, ["~sft.seed"])


def test_deleting_a_key_that_others_interpolate_is_caught(tmp_path):
    path = child(tmp_path, "logger: {wandb: {project: '${policy.tokenizer.chat_template}x'}}\n")
    text = refusal(path, ["~policy.tokenizer.chat_template"])
    assert "logger.wandb.project" in text
    assert "policy.tokenizer.chat_template, which override '~policy.tokenizer.chat_template' deleted" in text
    assert f"{path}:2" in text


@pytest.mark.parametrize(
    "override",
    [
        "policy.megatron_cfg.peft.dim=16",
        "policy.megatron_cfg.peft={dim: 16}",
        "policy.megatron_cfg={peft: {dim: 16}}",
        "policy={megatron_cfg: {peft: {dim: 16}}}",
        "policy.megatron_cfg.lora_cfg.dim=16",
    ],
)
def test_peft_is_another_name_of_lora_cfg(override):
    lora = load(*MEGATRON, override).recipe.policy.megatron_cfg.lora_cfg
    assert lora.dim == 16
    assert lora.alpha == 32


def test_interpolations_may_use_the_other_name_too():
    assert load("sft.seed=${policy.megatron_cfg.peft.dim}").recipe.sft.seed == 8


def test_origin_names_the_override():
    resolved = load("sft.seed=3", "logger.wandb={name: n}")
    assert resolved.origin("sft.seed") == "override 'sft.seed=3'"
    assert resolved.origin("logger.wandb.name") == "override 'logger.wandb={name: n}'"
    assert resolved.origin("logger.wandb.project").startswith(f"{SFT}:")
