# SPDX-License-Identifier: Apache-2.0
"""Training that goes on from an adapter: its factors in place of drawn ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_suite.blueprint.targets import AdapterSite
from lora_suite.config.errors import ConfigError
from lora_suite.config.paths import locate
from lora_suite.config.schema import Recipe
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.peft_format import matching_factors


def start_from_adapter(
    bank: AdapterBank, recipe: Recipe, recipe_path: Path, sites: Sequence[AdapterSite]
) -> None:
    """Give the bank the factors of the folder that ``lora_cfg.adapter`` names; without one it stays as it is.

    sites: all adapters of the recipe, those of other pipeline stages included. Every rank reads the folder.
    Raises ConfigError for a folder that is not there or cannot be read, and for adapters that are not exactly
    the recipe's.
    """
    name = recipe.policy.lora.adapter
    if name is None:
        return
    path = locate(name, recipe_path)
    if path is None:
        key = f"policy.{recipe.policy.backend}_cfg.lora_cfg.adapter"
        raise ConfigError(f"{recipe_path}: {key}: there is no folder {name}")
    sizes = {
        site.name: (site.in_features, site.out_features, *([site.experts] if site.experts else []))
        for site in sites
    }
    bank.load_factors(matching_factors(read_adapter(path), sizes, bank.adapters[0].spec))
