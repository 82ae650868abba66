# SPDX-License-Identifier: Apache-2.0
"""A recipe file plus overrides becomes a resolved, typed, consistent `Recipe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lora_suite.config.checks import check_recipe
from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import similar_file
from lora_suite.config.schema import Recipe
from lora_suite.config.tree import flatten

DEFAULT_ORIGIN = "(default of the type)"


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe as it runs.

    tree: plain values of every key, under the names of the YAML (``_v2``). origins: for each dotted key that
    a file or an override set, where.
    """

    recipe: Recipe
    tree: dict[str, Any]
    path: Path
    overrides: tuple[str, ...]
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Return ``file:line`` or ``override '…'``: what set a dotted key last."""
        return origin_of(key, self.origins, DEFAULT_ORIGIN)


def origin_of(key: str, origins: Mapping[str, str], fallback: str) -> str:
    """Return where a dotted key was set, or else the nearest block around it, or else `fallback`."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return fallback


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Read a recipe with everything it inherits, apply overrides, resolve, type and cross-check it.

    Raises ConfigError: one message that names the place (file and line, or the override), the key, and the
    nearest valid name or what to write instead.
    """
    from lora_suite.config.layers import read_layers
    from lora_suite.config.resolvers import resolve
    from lora_suite.config.typed import to_recipe

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such recipe{similar_file(path)}")
    layered = read_layers(path)
    deleted: dict[str, str] = {}
    if overrides:
        from lora_suite.config.overrides import apply_overrides

        deleted = apply_overrides(layered, overrides)
    origins = dict(layered.origins)

    def origin(key: str) -> str:
        return origin_of(key, origins, str(path))

    recipe = to_recipe(*resolve(layered.config, deleted), origin, deleted)
    check_recipe(recipe, origin)
    tree = recipe.model_dump(mode="json", by_alias=True)
    return ResolvedRecipe(recipe, tree, path, tuple(overrides), origins)


def show(path: Path, overrides: Sequence[str], origin: bool) -> str:
    """Return the resolved recipe as YAML; with `origin`, each key has a comment that says what set it."""
    resolved = load_recipe(path, overrides)
    if not origin:
        return yaml.safe_dump(resolved.tree, sort_keys=False, allow_unicode=True, width=1000)
    flat = flatten(resolved.tree)
    rows = [(f"{key}: {_inline(value)}", resolved.origin(key)) for key, value in flat.items()]
    width = min(max(len(text) for text, _ in rows), 72)
    return "".join(f"{text:<{width}}  # {where}\n" for text, where in rows)


def _inline(value: object) -> str:
    """Return one value as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
        .split("\n...")[0]
        .strip()
    )
