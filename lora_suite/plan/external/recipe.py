# SPDX-License-Identifier: Apache-2.0
"""Recipes of another trainer as plain values, to be compared and quoted, never instantiated.

What they inherit is merged as ours is (``defaults:``, ``_override_``), ``_target_`` stays a text, and of
interpolations only references and arithmetic (``${mul:…}``) are evaluated. Every other resolver, those that
read the environment or call code among them, stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lora_suite.config.errors import ConfigError
from lora_suite.config.layers import lookup, read_layers
from lora_suite.config.overrides import apply_overrides
from lora_suite.config.resolvers import resolve

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "max"})
_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_UNKNOWN_VARIABLE = re.compile(r"(?P<key>[^=]+=)(?P<value>[^'\"]*\$[^'\"]*)")


def opaque_recipe(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Merge a recipe with what it inherits and the overrides, and evaluate what is arithmetic.

    overrides: in Hydra's grammar; a shell variable that is not known (``policy.model_name=$CKPT``) is a text.
    A value that cannot be evaluated stays as it is written. Raises ConfigError naming file and line, or the
    override.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such recipe")
    layered = read_layers(path)
    apply_overrides(layered, [_quoted(text) for text in overrides])
    raw = layered.tree
    config = OmegaConf.create(_without_other_resolvers(raw))
    values, failures = resolve(config, {})
    for key in failures:
        _, written = lookup(raw, key)
        _put(values, key, written)
    return values


def _quoted(override: str) -> str:
    """An override in whose value a shell variable is left, as a quoted text."""
    match = _UNKNOWN_VARIABLE.fullmatch(override)
    return override if match is None else f"{match['key']}'{match['value']}'"


def _without_other_resolvers(value: Any) -> Any:
    """A tree in which texts that call anything but arithmetic are escaped, so that they stay texts."""
    if isinstance(value, dict):
        return {key: _without_other_resolvers(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_without_other_resolvers(item) for item in value]
    if isinstance(value, str) and not ARITHMETIC.issuperset(_RESOLVER.findall(value)):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    *blocks, last = key.split(".")
    for name in blocks:
        tree = tree.setdefault(name, {})
    tree[last] = value
