# SPDX-License-Identifier: Apache-2.0
"""Checks across keys."""

from __future__ import annotations

import pytest

from tests.config.helpers import MEGATRON, SFT, TINY_LORA, child, load, refusal

DTENSOR_LORA = "policy.dtensor_cfg.lora_cfg"
SHARDING = "policy.dtensor_cfg.sharding"
MEGATRON_LORA = "policy.megatron_cfg.lora_cfg"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.megatron_cfg.enabled=true"], "both backends are on"),
        (["policy.dtensor_cfg.enabled=false"], "no backend is on"),
        ([f"{MEGATRON_LORA}.enabled=true"], "LoRA is on for the megatron backend, which is off"),
        ([*MEGATRON, f"{DTENSOR_LORA}.enabled=true"], "LoRA is on for the dtensor backend, which is off"),
        ([f"{DTENSOR_LORA}.enabled=true", "policy.dtensor_cfg._v2=false"], "set policy.dtensor_cfg._v2=true"),
        (
            [
                f"{DTENSOR_LORA}.enabled=true",
                f"{DTENSOR_LORA}.match_all_linear=true",
                f"{DTENSOR_LORA}.target_modules=[q_proj]",
            ],
            "is true beside target_modules",
        ),
        (
            [
                f"{DTENSOR_LORA}.enabled=true",
                f"{DTENSOR_LORA}.match_all_linear=true",
                f"{DTENSOR_LORA}.exclude_modules=[q_proj]",
            ],
            "is true beside target_modules or exclude_modules",
        ),
        (
            [f"{DTENSOR_LORA}.enabled=true", f"{DTENSOR_LORA}.match_all_linear=false"],
            "nothing would be adapted",
        ),
        (
            [
                f"{DTENSOR_LORA}.enabled=true",
                f"{DTENSOR_LORA}.target_modules=[q_proj]",
                f"{DTENSOR_LORA}.exclude_modules=[k_proj]",
            ],
            "target_modules and exclude_modules are both set",
        ),
        (
            [*MEGATRON, f"{MEGATRON_LORA}.enabled=true", f"{MEGATRON_LORA}.lora_A_init_method=zero"],
            "A and B both start at zero",
        ),
        ([*MEGATRON, "policy.megatron_cfg.sequence_parallel=true"], "tensor_model_parallel_size=2 or more"),
        (
            ["policy.dtensor_cfg.tensor_parallel_size=2"],
            "1 processes (cluster.num_nodes × cluster.gpus_per_node)",
        ),
        (
            [*MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=3"],
            "groups of 2",
        ),
        ([*MEGATRON, "policy.megatron_cfg.optimizer.clip_grad=0.5"], "set policy.max_grad_norm"),
        ([*MEGATRON, "policy.megatron_cfg.optimizer.min_lr=1e-7"], "set policy.scheduler.min_lr_ratio"),
        (["data.validation=null"], "there are no rows for it"),
        (["data.train.split_validation_size=0.1"], "only where data.validation is null"),
        (["data.validation.split_validation_size=0.1"], "only training rows are split"),
        (["data.train.dataset_name=squad"], "data.train: set either data_path"),
        (["data.train.data_path=null"], "data.train: set either data_path"),
        (["data.max_input_seq_length=2000"], "more than policy.max_total_sequence_length (1024)"),
        (
            ["checkpointing.save_period=15"],
            "not every checkpoint (checkpointing.save_period 15) has a validation",
        ),
        (["sft.val_period=0"], "or set checkpointing.metric_name=null"),
        (["checkpointing.metric_name=loss"], "write val:val_loss, train:loss or null"),
        (
            ["policy.optimizer.kwargs.foreach=true", "policy.optimizer.kwargs.fused=true"],
            "foreach and fused are both true",
        ),
        (["debug.faults.kill_rank_at='1:2'"], "ranks end at 0"),
        (
            ["debug.faults.out_of_memory_at='1:2'"],
            "debug.faults.out_of_memory_at: is 1:2, but ranks end at 0",
        ),
        (
            ["cluster.gpus_per_node=4", "policy.dtensor_cfg.dp_replicate_size=3"],
            "is 3, which does not divide the 4 data parallel ranks",
        ),
        (
            ["cluster.gpus_per_node=2", f"{SHARDING}=hsdp"],
            "sharding: is hsdp, but 2 data parallel ranks are not several groups of several",
        ),
        *(
            (
                [
                    "cluster.gpus_per_node=4",
                    f"{SHARDING}={name}",
                    f"policy.dtensor_cfg.dp_replicate_size={size}",
                ],
                f"dp_replicate_size: is {size} of 4 data parallel ranks, but {SHARDING} is {name}",
            )
            for name, size in (
                ("replicate", 2),
                ("replicate", 1),
                ("fsdp", 4),
                ("fsdp", 2),
                ("hsdp", 1),
                ("hsdp", 4),
            )
        ),
    ],
)
def test_contradictions_are_refused(overrides, message):
    assert message in refusal(SFT, overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ["policy.dtensor_cfg.tensor_parallel_size=2", f"{DTENSOR_LORA}.implementation=peft"],
            f"{DTENSOR_LORA}.implementation",
        ),
        (
            [
                f"{DTENSOR_LORA}.implementation=peft",
                f"{DTENSOR_LORA}.dropout=0.1",
                f"{DTENSOR_LORA}.dropout_position=post",
            ],
            f"{DTENSOR_LORA}.dropout_position",
        ),
        (
            ["policy.require_fast_path=true", "policy.dtensor_cfg.fast_path=off"],
            "policy.dtensor_cfg.fast_path",
        ),
        (
            [*MEGATRON, "policy.require_fast_path=true", "policy.megatron_cfg.fast_path=off"],
            "policy.megatron_cfg.fast_path",
        ),
        (["policy.dtensor_cfg.cpu_offload=true"], "policy.dtensor_cfg.cpu_offload"),
        (["policy.dtensor_cfg.sequence_parallel=true"], "policy.dtensor_cfg.sequence_parallel"),
        (["policy.dtensor_cfg.context_parallel_size=2"], "policy.dtensor_cfg.context_parallel_size"),
        (["policy.dtensor_cfg.custom_parallel_plan=x.y"], "policy.dtensor_cfg.custom_parallel_plan"),
        (["+policy.dtensor_cfg.automodel_kwargs.backend=te"], "policy.dtensor_cfg.automodel_kwargs.backend"),
        (["policy.dynamic_batching.enabled=true"], "policy.dynamic_batching.enabled"),
        (["policy.tokenizer.chat_template_kwargs={a: 1}"], "policy.tokenizer.chat_template_kwargs"),
        (["data.num_workers=4"], "data.num_workers"),
        ([*MEGATRON, f"{MEGATRON_LORA}.a2a_experimental=true"], f"{MEGATRON_LORA}.a2a_experimental"),
        (
            [*MEGATRON, "policy.megatron_cfg.context_parallel_size=2"],
            "policy.megatron_cfg.context_parallel_size",
        ),
        (
            [*MEGATRON, "policy.megatron_cfg.expert_model_parallel_size=2"],
            "policy.megatron_cfg.expert_model_parallel_size",
        ),
        (
            [*MEGATRON, "policy.megatron_cfg.expert_tensor_parallel_size=2"],
            "policy.megatron_cfg.expert_tensor_parallel_size",
        ),
    ],
)
def test_what_is_not_available_is_refused_where_it_was_set(overrides, key):
    text = refusal(SFT, [*overrides, "cluster.gpus_per_node=2"])
    assert f"override {overrides[-1]!r}: {key}: " in text


def test_the_refusal_names_the_line_of_the_yaml(tmp_path):
    path = child(tmp_path, "policy:\n  dtensor_cfg:\n    cpu_offload: true\n")
    assert refusal(path).startswith(f"{path}:4: policy.dtensor_cfg.cpu_offload: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.dtensor_cfg._v2=false"],  # without LoRA
        ["policy.dtensor_cfg.fast_path=off"],
        ["policy.require_fast_path=true", "policy.megatron_cfg.fast_path=off"],  # of the other backend
        [f"{SHARDING}=replicate", "policy.dtensor_cfg.dp_replicate_size=1"],  # of one rank the same
        ["cluster.gpus_per_node=4", f"{SHARDING}=hsdp", "policy.dtensor_cfg.dp_replicate_size=2"],
        ["+policy.dtensor_cfg.automodel_kwargs.force_hf=true"],
        [*MEGATRON, f"{DTENSOR_LORA}.enabled=true", f"{MEGATRON_LORA}.enabled=true"],
        [
            *MEGATRON,
            f"{DTENSOR_LORA}.dropout=0.1",
            f"{DTENSOR_LORA}.implementation=peft",
        ],  # the block is not read
        [
            *MEGATRON,
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "policy.megatron_cfg.sequence_parallel=true",
            "cluster.gpus_per_node=2",
        ],
        [*MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"],
        ["data.validation=null", "data.train.split_validation_size=0.1"],
        ["data.validation=null", "sft.val_period=0", "sft.val_at_start=false", "checkpointing.enabled=false"],
        ["checkpointing.metric_name=null", "checkpointing.save_period=7"],
        ["checkpointing.metric_name=train:loss", "checkpointing.save_period=7"],
        ["data.train.data_path=null", "data.train.dataset_name=squad"],
        ["logger.wandb_enabled=true"],
        ["policy.sequence_packing.enabled=true", "data.pad_to_max_length=true"],
        ["policy.tokenizer.chat_template=x.jinja", "policy.tokenizer.chat_template_kwargs={a: 1}"],
        [
            "~policy.tokenizer.chat_template",
            "data.add_generation_prompt=false",
            "data.only_unmask_final=true",
        ],
        [f"{DTENSOR_LORA}.enabled=true", f"{DTENSOR_LORA}.match_all_linear=true"],
        [
            f"{DTENSOR_LORA}.enabled=true",
            f"{DTENSOR_LORA}.match_all_linear=false",
            f"{DTENSOR_LORA}.exclude_modules=['*o_proj']",
        ],
        ["debug.faults.kill_rank_at='1:2'", "cluster.gpus_per_node=2"],
    ],
)
def test_what_agrees_is_accepted(overrides):
    load(*overrides)


def test_several_problems_come_together():
    text = refusal(TINY_LORA, ["data.num_workers=1", "policy.dynamic_batching.enabled=true"])
    assert len(text.splitlines()) == 2
