# SPDX-License-Identifier: Apache-2.0
"""Small models and LoRA blocks for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_suite.blueprint import Linear, ModelShape, model_linears, read_shape
from lora_suite.config import load_recipe
from lora_suite.config.schema import DTensorLora, MegatronLora
from tests.config.helpers import RECIPES, SFT

MODELS = RECIPES / "models"

# A Llama of two layers whose LoRA sizes can be worked out by hand.
T2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def shape_of(folder: Path, **changes: Any) -> ModelShape:
    """Read the shape of T2 with changes; a change to None deletes the key."""
    path = folder / "model.json"
    config = {key: value for key, value in {**T2, **changes}.items() if value is not None}
    path.write_text(json.dumps(config))
    return read_shape(path)


def t2_linears(folder: Path, **changes: Any) -> tuple[Linear, ...]:
    """Return the linears of T2 with changes."""
    return model_linears(shape_of(folder, **changes))


def dtensor(**changes: Any) -> DTensorLora:
    """Return the default dtensor block, LoRA on, with changes."""
    lora = load_recipe(SFT).recipe.policy.dtensor_cfg.lora_cfg
    return lora.model_copy(update={"enabled": True, **changes})


def megatron(**changes: Any) -> MegatronLora:
    """Return the default Megatron block, LoRA on, with changes."""
    lora = load_recipe(SFT).recipe.policy.megatron_cfg.lora_cfg
    return lora.model_copy(update={"enabled": True, **changes})
