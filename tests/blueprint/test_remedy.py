# SPDX-License-Identifier: Apache-2.0
"""The key that a training which ran out of memory is told to change."""

from __future__ import annotations

import pytest

from lora_suite.blueprint import preflight
from lora_suite.blueprint.memory import mlps_in_one
from lora_suite.blueprint.remedy import Change, remedy
from lora_suite.blueprint.sharding import plan_memory
from lora_suite.config import load_recipe
from tests.config.helpers import MEGATRON, RECIPES

EIGHT = RECIPES / "sft-llama3.1-8b-1n8g-fsdp2tp1.yaml"
QUIET = ("policy.init=random", "sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false")
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8")
CHECKPOINTING = "activation_checkpointing"


def advice(*overrides: str, gib: int | None = 139, fast: bool = False) -> Change | None:
    """What is said of the 8B recipe with overrides on a GPU of so many GiB."""
    recipe = load_recipe(EIGHT, [*QUIET, *overrides]).recipe
    blueprint = preflight(recipe, EIGHT)
    memory = gib * 2**30 if gib is not None else None
    return remedy(recipe, blueprint, plan_memory(recipe, blueprint, memory, fast), fast)


def on(gpus: int, micro: int, length: int = 4096) -> list[str]:
    """Overrides for one micro batch on each of so many GPUs."""
    return [
        f"cluster.gpus_per_node={gpus}",
        f"policy.train_micro_batch_size={micro}",
        f"policy.train_global_batch_size={micro * gpus}",
        f"policy.max_total_sequence_length={length}",
    ]


def test_as_large_a_micro_batch_as_fits_comes_first() -> None:
    # About 15 GiB stand, and 25 a row: 200 of 8 rows, 104 of 4 (of 125 that may be filled).
    found = advice(*LORA, *on(1, 8))
    assert found is not None
    assert (found.key, found.value) == ("policy.train_micro_batch_size", "4")
    assert 100 < found.total / 2**30 < 125
    assert str(found) == (
        f"set policy.train_micro_batch_size=4 (then {found.total / 2**30:.1f} GiB by the model)"
    )


def test_shards_where_rows_alone_do_not_help() -> None:
    # 15 GiB of weights and 25 of one row do not fit into 40: an eighth of the weights does.
    found = advice(*LORA, *on(8, 1), "policy.dtensor_cfg.sharding=replicate", gib=40)
    assert found is not None
    assert (found.key, found.value) == ("policy.dtensor_cfg.sharding", "fsdp")
    numbered = advice(*LORA, *on(8, 1), "policy.dtensor_cfg.dp_replicate_size=8", gib=40)
    assert numbered is not None
    assert numbered.key == "policy.dtensor_cfg.sharding"


@pytest.mark.parametrize(
    ("backend", "gib", "value"),
    [("dtensor", 40, "selective"), ("dtensor", 26, "true"), ("megatron", 40, "true")],
)
def test_recomputation_where_activations_are_most(backend: str, gib: int, value: str) -> None:
    """First of what is cheap, where that is a choice and makes it fit."""
    lora = [each.replace("dtensor", backend) for each in LORA]
    found = advice(*(MEGATRON if backend == "megatron" else ()), *lora, *on(1, 1), gib=gib)
    assert found is not None
    assert (found.key, found.value) == (f"policy.{backend}_cfg.activation_checkpointing", value)


def test_the_fast_path_recomputes_in_part_and_stays_fast() -> None:
    # 15.7 GiB of weights and adapters, activations of 17 GiB, of 11.5 made anew in part.
    found = advice(*LORA, *on(1, 1), gib=34, fast=True)
    assert found is not None
    assert (found.key, found.value) == ("policy.dtensor_cfg.activation_checkpointing", "selective")
    assert 26 < found.total / 2**30 < 29


def test_then_products_of_as_many_layers_as_it_takes() -> None:
    # A tenth of 27.4 GiB must go, and gate and up are 224 MiB a layer: 12.5 of them.
    found = advice(
        *LORA, *on(1, 1), "policy.dtensor_cfg.activation_checkpointing=selective", gib=30, fast=True
    )
    assert found is not None
    assert (found.key, found.value) == ("policy.dtensor_cfg.recompute_mlp_layers", "13")
    # Adapters of attention alone leave the MLP several operations, so the fast path does not do it.
    attention = "policy.dtensor_cfg.lora_cfg.target_modules=['*q_proj','*v_proj']"
    keys = [*LORA, attention, *on(1, 1), "policy.dtensor_cfg.activation_checkpointing=selective"]
    recipe = load_recipe(EIGHT, [*QUIET, *keys]).recipe
    assert not mlps_in_one(preflight(recipe, EIGHT))


def test_experts_are_not_recomputed_in_part() -> None:
    path = RECIPES / "sft-nanov3-30ba3b-1n1g-fsdp2-lora.yaml"
    recipe = load_recipe(path, [*QUIET, *on(1, 1, length=8192)]).recipe
    blueprint = preflight(recipe, path)
    found = remedy(recipe, blueprint, plan_memory(recipe, blueprint, 90 * 2**30, False), False)
    assert found is not None
    assert (found.key, found.value) == ("policy.dtensor_cfg.activation_checkpointing", "true")


def test_the_most_that_can_be_saved_where_nothing_fits() -> None:
    found = advice(*LORA, *on(1, 1), gib=8)
    assert found is not None
    assert found.key == "policy.dtensor_cfg.activation_checkpointing"
    split = advice(*LORA, *on(2, 1), "policy.dtensor_cfg.activation_checkpointing=true", gib=8)
    assert split is not None
    assert split.key == "policy.dtensor_cfg.tensor_parallel_size"


def test_without_a_gpu_what_saves_most() -> None:
    found = advice(*LORA, *on(1, 8), gib=None)
    assert found is not None
    assert (found.key, found.value) == ("policy.train_micro_batch_size", "1")


def test_what_saves_less_than_a_tenth_is_not_worth_saying() -> None:
    keys = [*on(1, 1, length=64), "policy.dtensor_cfg.activation_checkpointing=true"]
    assert advice(*keys, gib=100) is None


@pytest.mark.parametrize(
    "keys",
    [
        [*on(2, 1), "policy.dtensor_cfg.lora_cfg.implementation=peft"],
        [*on(1, 1, length=16386), "policy.make_sequence_length_divisible_by=2"],
    ],
)
def test_nothing_is_advised_that_would_be_refused(keys: list[str]) -> None:
    """Tensor parallel layers of PEFT; rows of half the length that are no multiple of 2 any more."""
    keys = [*LORA, *keys, f"policy.dtensor_cfg.{CHECKPOINTING}=true"]
    found = advice(*keys, gib=1)
    if found is not None:
        changed = load_recipe(EIGHT, [*QUIET, *keys, f"{found.key}={found.value}"]).recipe
        preflight(changed, EIGHT)
