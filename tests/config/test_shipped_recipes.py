# SPDX-License-Identifier: Apache-2.0
"""Every recipe that is shipped resolves, bears a true name, passes preflight, and is one of a fair pair."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lora_suite.blueprint import preflight
from lora_suite.config import differences, load_recipe
from lora_suite.config.keys import schema_keys
from lora_suite.config.layers import read_layers
from lora_suite.config.naming import check_stem
from tests.config.helpers import RECIPES, ROOT, SFT

ALL = sorted(path for path in RECIPES.glob("*.yaml") if path != SFT)
LORA = [path for path in ALL if "-lora" in path.stem]
# Where full SFT does not fit.
ALONE = ("sft-nanov3-30ba3b-1n1g-fsdp2-lora",)
DATA = Path(os.environ.get("LORA_SUITE_DATA", ROOT.parent / "shared/data"))


def test_there_are_recipes_of_every_kind():
    stems = {path.stem for path in ALL}
    assert len(stems) == 51
    assert len(LORA) == 26


@pytest.mark.parametrize("init", ["as it is", "random"])
@pytest.mark.parametrize("path", [SFT, *ALL], ids=lambda path: path.stem)
def test_it_resolves_and_passes_preflight(path, init):
    resolved = load_recipe(path, [] if init == "as it is" else ["policy.init=random"])
    blueprint = preflight(resolved.recipe, path)
    assert blueprint.model is not None
    if resolved.recipe.policy.init == "random":
        assert resolved.recipe.policy.tokenizer.name == "bytes"
    if path != SFT:
        check_stem(path.stem, resolved.recipe)
        # A router of experts is frozen; adapters are far fewer than the weights.
        routers = sum(each.params for each in blueprint.linears if each.kind == "router")
        assert (blueprint.trainable_params < blueprint.total_params - routers) is (path in LORA)
        assert resolved.recipe.logger.wandb.name == path.stem


@pytest.mark.parametrize(
    "path", [path for path in LORA if path.stem not in ALONE], ids=lambda path: path.stem
)
def test_arms_differ_in_lora_learning_rate_and_name_alone(path):
    full = RECIPES / f"{path.stem.replace('-lora', '')}.yaml"
    changed = {key for key, _, _ in differences(load_recipe(full).tree, load_recipe(path).tree)}
    allowed = {
        "policy.optimizer.kwargs.lr",
        "policy.megatron_cfg.optimizer.lr",
        "policy.megatron_cfg.optimizer.min_lr",
        "logger.wandb.name",
    }
    assert not {key for key in changed - allowed if ".lora_cfg." not in key}
    assert any(key.endswith("lora_cfg.enabled") for key in changed)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron-tp2"])
def test_smoke_arms_of_both_backends_train_the_same(backend):
    one = load_recipe(RECIPES / "sft-tiny-llama-1n2c-fsdp2.yaml").tree
    other = load_recipe(RECIPES / f"sft-tiny-llama-1n2c-{backend}.yaml").tree
    keys = [key for key, _, _ in differences(one, other)]
    layout = (
        "policy.dtensor_cfg.enabled",
        "policy.megatron_cfg.",
        "policy.make_sequence",
        "logger.wandb.name",
    )
    assert [key for key in keys if not key.startswith(layout)] == []


@pytest.mark.parametrize("path", [path for path in ALL if "-1n2c-" in path.stem], ids=lambda path: path.stem)
def test_recipes_of_cpu_processes_leave_gpus_alone(path):
    policy = load_recipe(path).recipe.policy
    block = policy.dtensor_cfg if policy.backend == "dtensor" else policy.megatron_cfg
    assert block.env_vars["CUDA_VISIBLE_DEVICES"] == ""


def test_the_defaults_set_every_key_and_explain_it():
    origins = read_layers(SFT).origins
    blocks = {key.rpartition(".")[0] for key in schema_keys()}
    leaves = schema_keys() - blocks
    assert leaves <= origins.keys()
    lines = SFT.read_text().splitlines()
    for key in leaves:
        number = int(origins[key].rpartition(":")[2])
        near = lines[max(0, number - 8) : number]
        assert any("#" in line for line in near), f"{key} has no comment near line {number}"


def test_the_report_that_started_it_all_is_kept():
    for stem, lora in (("sft-nanov3-30ba3b-2n8g-fsdp2", False), ("sft-nanov3-30ba3b-2n8g-fsdp2-lora", True)):
        recipe = load_recipe(RECIPES / f"{stem}.yaml").recipe
        policy = recipe.policy
        assert (policy.max_total_sequence_length, policy.train_global_batch_size) == (2048, 16)
        assert (policy.train_micro_batch_size, policy.optimizer.name) == (1, "torch.optim.Adam")
        assert (recipe.sft.max_num_steps, recipe.world_size) == (20, 16)
        assert policy.lora.enabled is lora
        assert policy.lora.dim == 8


def test_sizes_of_the_8b_recipes_are_the_fields():
    for stem in ("sft-llama3.1-8b-1n8g-fsdp2tp1-lora", "sft-llama3.1-8b-1n8g-megatron-tp2-lora"):
        recipe = load_recipe(RECIPES / f"{stem}.yaml").recipe
        policy = recipe.policy
        assert (policy.max_total_sequence_length, policy.train_global_batch_size) == (4096, 128)
        assert (policy.lora.dim, policy.lora.alpha, recipe.sft.max_num_steps) == (128, 128, 50)
        assert policy.optimizer.kwargs.lr == policy.megatron_cfg.optimizer.lr == 2e-5


def test_restated_architectures_equal_the_recorded_ones():
    recorded = sorted((DATA / "models").glob("*.json"))
    if not recorded:
        pytest.skip("the recorded figures are not on this machine")
    for path in recorded:
        ours = json.loads((RECIPES / "models" / path.name).read_text())
        assert ours.pop("_name_or_path")
        assert ours == json.loads(path.read_text())
