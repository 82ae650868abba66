# SPDX-License-Identifier: Apache-2.0
"""Recipe YAML to a resolved, typed `Recipe`: inheritance, overrides, schema."""

from lora_suite.config.errors import ConfigError
from lora_suite.config.recipe import ResolvedRecipe, load_recipe, show
from lora_suite.config.tree import ABSENT, differences, flatten, recipe_hash

__all__ = [
    "ABSENT",
    "ConfigError",
    "ResolvedRecipe",
    "differences",
    "flatten",
    "load_recipe",
    "recipe_hash",
    "show",
]
