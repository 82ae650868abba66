# SPDX-License-Identifier: Apache-2.0
"""What is read of a configuration and what is refused; rotary frequencies against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lora_suite.blueprint.shape import read_shape
from lora_suite.config.errors import ConfigError
from lora_suite.train.backends.megatron.architecture import Architecture

MODELS = Path(__file__).resolve().parents[3] / "recipes" / "models"


def read(model: str, tmp_path: Path, **changes: object) -> Architecture:
    config = json.loads((MODELS / f"{model}.json").read_text()) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return Architecture.read(read_shape(path), config)


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_llama3_frequencies_are_those_of_transformers(model, tmp_path):
    architecture = read(model, tmp_path)
    ours = RotaryEmbedding(
        kv_channels=architecture.shape.head_dim,
        rotary_percent=1.0,
        rotary_base=architecture.rope_base,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor,
        use_cpu_initialization=True,
    ).inv_freq
    theirs, scaling = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**json.loads((MODELS / f"{model}.json").read_text()))
    )
    assert scaling == 1.0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_both_forms_of_rotary_parameters_mean_the_same(tmp_path):
    old = read("llama-3.2-1b", tmp_path)
    config = json.loads((MODELS / "llama-3.2-1b.json").read_text())
    parameters = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    new = read("llama-3.2-1b", tmp_path, rope_scaling=None, rope_theta=None, rope_parameters=parameters)
    assert (old.rope_base, old.rope_factor) == (new.rope_base, new.rope_factor) == (500000.0, 32.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"output_router_logits": True}, "output_router_logits True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 2.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "high_freq_factor 2.0",
        ),
    ],
)
def test_refuses_what_it_would_compute_differently(changes, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        read("tiny-llama", tmp_path, **changes)
