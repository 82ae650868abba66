# SPDX-License-Identifier: Apache-2.0
"""Small recipes for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lora_suite.config import ConfigError, ResolvedRecipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SFT = RECIPES / "sft.yaml"
TINY = RECIPES / "sft-tiny-llama-1n2c-fsdp2.yaml"
TINY_LORA = RECIPES / "sft-tiny-llama-1n2c-fsdp2-lora.yaml"
TINY_MEGATRON = RECIPES / "sft-tiny-llama-1n2c-megatron-tp2.yaml"
TINY_MEGATRON_LORA = RECIPES / "sft-tiny-llama-1n2c-megatron-tp2-lora.yaml"
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")


def child(folder: Path, text: str, name: str = "child.yaml", parent: Path = SFT) -> Path:
    """Write a recipe that inherits from `parent` and return its path."""
    path = folder / name
    path.write_text(f"defaults: {parent}\n{text}", encoding="utf-8")
    return path


def load(*overrides: str, path: Path = SFT) -> ResolvedRecipe:
    """Load a shipped recipe with overrides."""
    return load_recipe(path, overrides)


def refusal(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the message with which a recipe is refused."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)
