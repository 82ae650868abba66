# SPDX-License-Identifier: Apache-2.0
"""`sharding: auto` shards no more than memory demands; names and numbers are taken as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_suite.blueprint import preflight
from lora_suite.blueprint.sharding import MemoryPlan, named_sharding, plan_memory
from lora_suite.config import load_recipe
from tests.config.helpers import MEGATRON, RECIPES

EIGHT, NANO = (
    RECIPES / f"{stem}.yaml" for stem in ("sft-llama3.1-8b-1n8g-fsdp2tp1", "sft-nanov3-30ba3b-2n8g-fsdp2")
)
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8")
SHARDING, REPLICAS = "policy.dtensor_cfg.sharding", "policy.dtensor_cfg.dp_replicate_size"
H200 = 139 * 2**30


def plan(path: Path, *overrides: str, memory: int | None = H200, fast: bool = False) -> MemoryPlan:
    """The plan of a shipped recipe with overrides."""
    recipe = load_recipe(path, ["policy.init=random", *overrides]).recipe
    return plan_memory(recipe, preflight(recipe, path), memory, fast)


def chosen(found: MemoryPlan) -> tuple[str, int, int]:
    """Its name, replicas and shards."""
    return found.sharding, found.layout.replicas, found.layout.shards


def test_frozen_weights_that_fit_are_replicated() -> None:
    found = plan(EIGHT, *LORA)
    assert chosen(found) == ("replicate", 8, 1)
    assert not found.too_large


def test_no_more_ranks_share_weights_than_must() -> None:
    # 15 GiB of frozen weights and about 22 of the pass: the less memory, the more shards.
    seen = [plan(EIGHT, *LORA, memory=gib * 2**30) for gib in range(60, 20, -1)]
    assert [found.layout.shards for found in seen] == sorted(found.layout.shards for found in seen)
    assert {found.sharding for found in seen} == {"replicate", "hsdp", "fsdp"}
    for found in seen:
        if found.layout.shards > 1 and not found.too_large:
            fewer = plan(EIGHT, *LORA, f"{REPLICAS}={found.layout.replicas * 2}", memory=found.memory)
            assert fewer.too_large


def test_what_fits_in_no_way_is_sharded_over_all_and_said() -> None:
    found = plan(EIGHT, memory=16 * 2**30)
    assert (chosen(found), found.too_large) == (("fsdp", 1, 8), True)
    assert "weights sharded over 8 ranks (fsdp); the memory model expects " in str(found)
    assert str(found).endswith(" of 16 GiB a rank")


def test_full_sft_of_a_large_model_is_sharded() -> None:
    whole_experts = "policy.dtensor_cfg.expert_parallel_size=1"
    assert plan(NANO, whole_experts).sharding != "replicate"
    assert plan(NANO, whole_experts, "policy.dtensor_cfg.lora_cfg.enabled=true").sharding == "replicate"


def test_without_a_gpu_or_a_shape_auto_shards_over_all() -> None:
    assert chosen(plan(EIGHT, *LORA, memory=None)) == ("fsdp", 1, 8)
    recipe = load_recipe(EIGHT, [*LORA, "policy.init=random"]).recipe
    blueprint = replace(preflight(recipe, EIGHT), model=None)
    unknown = plan_memory(recipe, blueprint, H200, fast=False)
    assert (chosen(unknown), unknown.estimate) == (("fsdp", 1, 8), None)
    assert str(unknown) == "weights sharded over 8 ranks (fsdp)"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{SHARDING}=replicate"], ("replicate", 8, 1)),
        ([f"{SHARDING}=fsdp"], ("fsdp", 1, 8)),
        ([f"{SHARDING}=hsdp"], ("hsdp", 4, 2)),
        ([f"{SHARDING}=hsdp", f"{REPLICAS}=2"], ("hsdp", 2, 4)),
        ([f"{REPLICAS}=1"], ("fsdp", 1, 8)),
        ([f"{REPLICAS}=8"], ("replicate", 8, 1)),
    ],
)
def test_what_the_recipe_names_is_done(overrides: list[str], expected: tuple[str, int, int]) -> None:
    assert chosen(plan(EIGHT, *LORA, *overrides)) == expected


def test_the_fast_path_and_megatron_hold_weights_whole() -> None:
    assert chosen(plan(EIGHT, *LORA, memory=None, fast=True)) == ("replicate", 8, 1)
    assert chosen(plan(EIGHT, *MEGATRON, memory=None)) == ("replicate", 8, 1)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], None),
        ([f"{SHARDING}=replicate"], None),
        ([f"{REPLICAS}=8"], None),
        ([f"{SHARDING}=fsdp"], f"{SHARDING} is fsdp"),
        ([f"{REPLICAS}=2"], f"{REPLICAS} is 2"),
        ([f"{SHARDING}=fsdp", "cluster.gpus_per_node=1"], None),
    ],
)
def test_who_asks_for_sharded_weights_is_named(overrides: list[str], key: str | None) -> None:
    assert named_sharding(load_recipe(EIGHT, overrides).recipe) == key


def test_it_says_that_experts_are_split() -> None:
    pair = RECIPES / "sft-nanov3-30ba3b-1n2g-fsdp2.yaml"
    text = str(plan(pair, fast=True))
    assert text.startswith(
        "weights held whole, 2 times (replicate), experts split over 2; the memory model expects "
    )
    assert "experts" not in str(plan(EIGHT))
