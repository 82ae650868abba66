# SPDX-License-Identifier: Apache-2.0
"""In what arms may differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import load_recipe
from lora_suite.plan.comparability import NO_FAULTS, compare_arms, planted_faults

ROOT = Path(__file__).resolve().parents[2]
FULL = ROOT / "recipes" / "sft-tiny-llama-1n2c-fsdp2.yaml"
LORA = ROOT / "recipes" / "sft-tiny-llama-1n2c-fsdp2-lora.yaml"
MEGATRON = ROOT / "recipes" / "sft-tiny-llama-1n2c-megatron-tp2.yaml"


def keys(left: Path, right: Path, *overrides: str, allow: tuple[str, ...] = ()) -> list[str]:
    """Keys beyond the allowed ones, with overrides of the right arm."""
    found = compare_arms(load_recipe(left).tree, load_recipe(right, overrides).tree, allow)
    return [difference.key for difference in found]


def test_lora_learning_rate_names_paths_and_faults_may_differ() -> None:
    assert (
        keys(
            FULL,
            LORA,
            "policy.dtensor_cfg.lora_cfg.dim=64",
            "policy.optimizer.kwargs.lr=0.5",
            "logger.wandb.name=other",
            "logger.log_dir=/tmp/elsewhere",
            "checkpointing.checkpoint_dir=other",
            "debug.faults.slow_step=3.0",
        )
        == []
    )


@pytest.mark.parametrize(
    "override",
    [
        "policy.train_micro_batch_size=2",
        "policy.optimizer.kwargs.weight_decay=0.5",
        "policy.dtensor_cfg.activation_checkpointing=true",
        "policy.precision=bfloat16",
        "sft.seed=1",
        "data.shuffle=false",
        "policy.scheduler.warmup_steps=1",
    ],
)
def test_anything_else_may_not(override: str) -> None:
    assert keys(FULL, LORA, override) == [override.partition("=")[0]]


def test_difference_has_both_values() -> None:
    left, right = load_recipe(FULL).tree, load_recipe(LORA, ["policy.train_micro_batch_size=2"]).tree
    (found,) = compare_arms(left, right)
    assert (found.left, found.right) == (4, 2)


def test_block_of_a_backend_that_neither_arm_enables_does_not_count() -> None:
    assert keys(FULL, LORA, "policy.megatron_cfg.tensor_model_parallel_size=2") == [
        # What follows from it does.
        "policy.make_sequence_length_divisible_by"
    ]


def test_backends_differ_in_what_their_pair_allows_and_no_more() -> None:
    found = keys(FULL, MEGATRON)
    assert "policy.dtensor_cfg.enabled" in found
    assert "policy.megatron_cfg.tensor_model_parallel_size" in found
    allow = ("policy.dtensor_cfg", "policy.megatron_cfg", "policy.make_sequence_length_divisible_by")
    assert keys(FULL, MEGATRON, allow=allow) == []
    assert keys(FULL, MEGATRON, "sft.seed=1", allow=allow) == ["sft.seed"]


def test_prefix_ends_at_a_dot() -> None:
    assert keys(FULL, LORA, "policy.train_micro_batch_size=2", allow=("policy.train_micro",)) != []
    assert keys(FULL, LORA, "policy.train_micro_batch_size=2", allow=("policy.train_micro_batch_size",)) == []


def test_planted_faults_are_listed() -> None:
    left, right = load_recipe(FULL).tree, load_recipe(LORA, ["debug.faults.slow_step=3.0"]).tree
    (fault,) = planted_faults(left, right)
    assert (fault.key, fault.left, fault.right) == ("debug.faults.slow_step", 1.0, 3.0)


def test_no_faults_are_the_defaults_of_a_recipe() -> None:
    assert load_recipe(FULL).tree["debug"]["faults"] == NO_FAULTS
