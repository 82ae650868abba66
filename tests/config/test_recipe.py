# SPDX-License-Identifier: Apache-2.0
"""Recipes as a whole: the field's command lines, the resolved tree, its printed form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lora_suite.config import ConfigError, load_recipe, show
from lora_suite.config.recipe import DEFAULT_ORIGIN
from lora_suite.config.tree import flatten
from tests.config.helpers import SFT, TINY_LORA, child, load, refusal

# Options of the commands in https://github.com/NVIDIA-NeMo/RL/issues/1688, and of pull request 1629 there.
REPORT = """
logger.wandb_enabled=True \\
logger.wandb.project=lora \\
logger.wandb.name=nano_v3_lora \\
policy.model_name=nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 \\
checkpointing.enabled=False \\
policy.dtensor_cfg.enabled=true \\
policy.dtensor_cfg._v2=true \\
policy.dtensor_cfg.lora_cfg.enabled={lora} \\
policy.dtensor_cfg.lora_cfg.use_triton=False \\
policy.dtensor_cfg.lora_cfg.dim=8 \\
policy.max_total_sequence_length=2048 \\
policy.train_global_batch_size=16 \\
policy.train_micro_batch_size=1 \\
policy.optimizer.name="torch.optim.Adam" \\
~policy.tokenizer.chat_template  \\
sft.max_num_steps=10 \\
cluster.num_nodes=2 \\
cluster.gpus_per_node=8
"""
MEGATRON = """
policy.dtensor_cfg.enabled=false \\
policy.megatron_cfg.enabled=true \\
policy.megatron_cfg.{block}.enabled=true
"""


def as_bash_passes(command: str) -> list[str]:
    """Return the words that a program gets when bash runs it with this command line."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command.strip()}"], capture_output=True, text=True, check=True
    )
    return done.stdout.rstrip("\0").split("\0")


@pytest.mark.parametrize("lora", ["True", "False"])
def test_the_commands_of_the_first_report_resolve_unchanged(lora):
    words = as_bash_passes(REPORT.format(lora=lora))
    assert "~policy.tokenizer.chat_template" in words
    recipe = load(*words).recipe
    policy = recipe.policy
    assert policy.model_name == "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    assert policy.tokenizer.name == policy.model_name
    assert policy.tokenizer.chat_template == "default"
    assert policy.dtensor_cfg.lora_cfg.enabled is (lora == "True")
    assert policy.dtensor_cfg.lora_cfg.dim == 8
    assert policy.dtensor_cfg.v2 is True
    assert policy.optimizer.name == "torch.optim.Adam"
    assert (recipe.world_size, recipe.data_parallel_size) == (16, 16)
    assert recipe.logger.wandb.name == "nano_v3_lora"
    assert recipe.checkpointing.enabled is False


@pytest.mark.parametrize("block", ["lora_cfg", "peft"])
def test_the_megatron_command_resolves_unchanged(block):
    recipe = load(*as_bash_passes(MEGATRON.format(block=block))).recipe
    assert recipe.policy.backend == "megatron"
    assert recipe.policy.lora.enabled is True


def test_the_tree_is_plain_and_uses_the_names_of_the_yaml():
    resolved = load("policy.dtensor_cfg._v2=true")
    dtensor = resolved.tree["policy"]["dtensor_cfg"]
    assert dtensor["_v2"] is True
    assert "v2" not in dtensor
    assert resolved.tree["policy"]["optimizer"]["kwargs"]["betas"] == [0.9, 0.98]
    assert not [value for value in flatten(resolved.tree).values() if "${" in str(value)]
    assert resolved.path == SFT
    assert resolved.overrides == ("policy.dtensor_cfg._v2=true",)


def test_origins_reach_through_inheritance(tmp_path):
    path = child(tmp_path, "sft:\n  seed: 3\n")
    resolved = load_recipe(path)
    assert resolved.origin("sft.seed") == f"{path}:3"
    line = SFT.read_text().splitlines()[int(resolved.origin("sft.val_period").rpartition(":")[2]) - 1]
    assert line.strip().startswith("val_period:")
    assert resolved.origin("nothing.like.this") == DEFAULT_ORIGIN


def test_show_prints_a_recipe_that_resolves_to_the_same(tmp_path):
    path = tmp_path / "shown.yaml"
    path.write_text(show(TINY_LORA, ["sft.seed=5"], origin=False))
    assert load_recipe(path).tree == load_recipe(TINY_LORA, ["sft.seed=5"]).tree


def test_show_with_origin_names_file_and_line_of_each_key():
    text = show(TINY_LORA, ["sft.seed=5"], origin=True)
    flat = flatten(load_recipe(TINY_LORA, ["sft.seed=5"]).tree)
    assert yaml.safe_load(text).keys() == flat.keys()
    lines = dict(line.split(":", 1) for line in text.splitlines())
    assert lines["sft.seed"].endswith("# override 'sft.seed=5'")
    assert lines["policy.dtensor_cfg.lora_cfg.enabled"].endswith(f"# {TINY_LORA}:9")


def test_a_missing_recipe_names_the_nearest(tmp_path):
    (tmp_path / "sft-tiny.yaml").write_text("")
    assert f"the nearest is {tmp_path / 'sft-tiny.yaml'}" in refusal(tmp_path / "sft-tin.yaml")
    with pytest.raises(ConfigError, match="there is no such recipe"):
        load_recipe(tmp_path)


def test_override_marker_works_in_a_whole_recipe(tmp_path):
    path = child(tmp_path, "data:\n  train:\n    _override_: true\n    data_path: data/quickstart.jsonl\n")
    resolved = load_recipe(path)
    assert resolved.recipe.data.train.output_key == "output"
    assert "_override_" not in flatten(resolved.tree)


def test_importing_the_room_is_quick_and_leaves_torch_alone():
    code = "import lora_suite.config, sys; print({'torch', 'transformers', 'hydra'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout.strip() == "set()"
