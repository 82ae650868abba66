# SPDX-License-Identifier: Apache-2.0
"""Names of recipes against what they resolve to."""

from __future__ import annotations

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.config.naming import check_stem
from tests.config.helpers import MEGATRON, load

LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"
TWO_BY_EIGHT = ("cluster.num_nodes=2", "cluster.gpus_per_node=8")
TP2 = ("policy.dtensor_cfg.tensor_parallel_size=2", "cluster.gpus_per_node=2")
MTP2 = (*MEGATRON, "policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.gpus_per_node=4")


@pytest.mark.parametrize(
    ("stem", "overrides"),
    [
        ("sft-llama3.1-8b-1n1g-fsdp2", []),
        ("sft-llama3.1-8b-1n1g-fsdp2tp1", []),
        ("sft-llama3.1-8b-1n1g-fsdp2tp1-lora", [LORA]),
        ("sft-nanov3-30BA3B-2n8g-fsdp2-lora", [*TWO_BY_EIGHT, LORA]),
        ("SFT-TINY-LLAMA-1N1C-FSDP2", []),
        ("sft-tiny-llama-1n2c-fsdp2tp2", TP2),
        ("sft-tiny-llama-1n2c-fsdp2-tp2-lora-long.quick", [*TP2, LORA]),
        ("sft-x-1n1g-fsdp2-squad-lora", [LORA]),
        ("sft-x-1n1g-megatron", MEGATRON),
        ("sft-x-1n4g-megatron-tp2", MTP2),
        ("sft-x-1n4g-megatrontp2", MTP2),
        ("sft-x-1n4g-megatron-tp2pp2", [*MTP2, "policy.megatron_cfg.pipeline_model_parallel_size=2"]),
        ("sft-x-1n4g-megatron-tp2-pp2", [*MTP2, "policy.megatron_cfg.pipeline_model_parallel_size=2"]),
        ("sft-x-1n4g-megatron-tp2sp", [*MTP2, "policy.megatron_cfg.sequence_parallel=true"]),
        ("sft-x-1n4g-megatron-tp2-lora", [*MTP2, "policy.megatron_cfg.lora_cfg.enabled=true"]),
        ("sft-x-1n1g-fsdp2-speed", []),
    ],
)
def test_true_names_are_accepted(stem, overrides):
    check_stem(stem, load(*overrides).recipe)


@pytest.mark.parametrize(
    ("stem", "overrides", "message"),
    [
        ("sft-x-2n1g-fsdp2", [], "it says 2 nodes, but cluster.num_nodes is 1"),
        ("sft-x-1n8g-fsdp2", [], "it says 8 processes a node, but cluster.gpus_per_node is 1"),
        ("sft-x-1n1g-megatron", [], "it says backend megatron, but the enabled backend is fsdp2"),
        ("sft-x-1n1g-fsdp2", MEGATRON, "it says backend fsdp2"),
        ("sft-x-1n1g-fsdp2tp2", [], "it says tp 2, but policy.dtensor_cfg.tensor_parallel_size is 1"),
        ("sft-x-1n2g-fsdp2", TP2, "it says tp 1, but policy.dtensor_cfg.tensor_parallel_size is 2"),
        ("sft-x-1n4g-megatron", MTP2, "tensor_model_parallel_size is 2"),
        ("sft-x-1n1g-fsdp2pp2", [], "it says pp 2"),
        ("sft-x-1n4g-megatron-tp2sp", MTP2, "it says sp, but sequence_parallel is off"),
        ("sft-x-1n1g-fsdp2-lora", [], "it has -lora, but policy.dtensor_cfg.lora_cfg.enabled is false"),
        ("sft-x-1n1g-fsdp2", [LORA], "it lacks -lora, but policy.dtensor_cfg.lora_cfg.enabled is true"),
        ("sft-x-1n1g-fsdp2-loratron", [LORA], "it lacks -lora"),
        ("dpo-x-1n1g-fsdp2", [], "does not follow"),
        ("sft-x-1n1g-fsdp", [], "does not follow"),
        ("sft-1n1g-fsdp2", [], "does not follow"),
        ("sft-x-1n1g", [], "does not follow"),
        ("sft-x-1n1x-fsdp2", [], "does not follow"),
        ("sft-x_1n1g-fsdp2", [], "does not follow"),
    ],
)
def test_untrue_names_are_refused(stem, overrides, message):
    recipe = load(*overrides).recipe
    with pytest.raises(ConfigError) as caught:
        check_stem(stem, recipe)
    assert message in str(caught.value)
    assert stem in str(caught.value)


def test_every_disagreement_is_listed():
    recipe = load().recipe
    with pytest.raises(ConfigError) as caught:
        check_stem("sft-x-2n8g-megatron-lora", recipe)
    assert str(caught.value).count(";") == 3
