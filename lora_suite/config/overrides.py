# SPDX-License-Identifier: Apache-2.0
"""Overrides of the command line, in hydra's grammar: ``key=``, ``+key=``, ``++key=``, ``~key``.

``key=value`` sets what is there, ``+key=value`` adds what is not, ``++key=value`` does either, ``~key``
deletes (``~key=value`` only if that is the value). Values have hydra's types: numbers, true/false, null,
quoted strings, lists, mappings, interpolations. Sweeps (``key=1,2``) are refused: a recipe is one training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lora_suite.config.errors import ConfigError
from lora_suite.config.keys import is_free_form, schema_keys
from lora_suite.config.layers import Layered, lookup, rename_aliases, rename_key, rename_references
from lora_suite.config.tree import flatten
from lora_suite.config.typed import valid_names


def apply_overrides(layered: Layered, overrides: Sequence[str]) -> dict[str, str]:
    """Apply overrides in order; return the keys that were deleted, with the override that did it.

    Raises ConfigError naming the override, the key and the nearest key that exists.
    """
    parser = OverridesParser.create()
    deleted: dict[str, str] = {}
    for text in overrides:
        override = _parse(parser, text)
        key = rename_key(str(override.key_or_group))
        if override.is_delete():
            _delete(layered, override, key)
            deleted[key] = text
        else:
            _set(layered, override, key)
            deleted.pop(key, None)
    return deleted


def _parse(parser: OverridesParser, text: str) -> Override:
    """Parse one override; refuse what has no meaning for a single training."""
    try:
        (override,) = parser.parse_overrides([text])
    except HydraException as error:
        raise ConfigError(f"override {text!r}: {_syntax_hint(text)}") from error
    if override.is_sweep_override():
        key = str(override.key_or_group)
        raise ConfigError(
            f"override {text!r}: several values (a sweep) for {key}; a recipe is one training. "
            f"Write a list as '{key}=[a,b]', a text with commas as \"{key}='a,b'\""
        )
    if override.package is not None or "/" in str(override.key_or_group):
        raise ConfigError(f"override {text!r}: keys are words joined by dots, as in policy.model_name")
    return override


def _syntax_hint(text: str) -> str:
    """Say what is wrong with an override that hydra's grammar cannot read, and what to write instead."""
    key, equals, value = text.partition("=")
    if text.startswith("-"):
        return "this is not an option of the command; overrides are KEY=VALUE"
    if not equals:
        return "write KEY=VALUE (or ~KEY to delete a key)"
    if any(mark in key for mark in " \t\"'"):
        return f"the key {key!r} is not words joined by dots"
    reason = "starts with a tilde" if value.startswith("~") else "has a character of the grammar's own"
    return f"the value {reason}; quote it inside the word: \"{key}='{value}'\""


def _set(layered: Layered, override: Override, key: str) -> None:
    """Set or add one key."""
    text, value = str(override.input_line), override.value()
    there, old = lookup(layered.tree, key)
    if override.is_add() and there and not isinstance(value, dict | list):
        raise ConfigError(f"override {text!r}: {key} is there already ({old!r}); write {text.lstrip('+')}")
    if not there and not (override.is_add() or override.is_force_add()):
        raise ConfigError(f"override {text!r}: {_unknown(layered, key)}")
    if isinstance(value, dict):
        wrapped: dict[str, Any] = value
        for part in reversed(key.split(".")):
            wrapped = {part: wrapped}
        rename_aliases(wrapped, {}, f"override {text!r}")
        _, value = lookup(wrapped, key)
    ancestors = [key[:end] for end, letter in enumerate(key) if letter == "."]
    replaced = [name for name in ancestors if not isinstance(lookup(layered.tree, name)[1], dict)]
    try:
        OmegaConf.update(layered.config, key, rename_references(value), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"override {text!r}: {str(error).strip().splitlines()[0]}") from error
    if isinstance(value, dict) and value:
        for below in flatten(value):
            layered.origins[f"{key}.{below}"] = f"override {text!r}"
    else:
        layered.forget(key)
    for name in (*replaced, key):
        layered.origins[name] = f"override {text!r}"


def _delete(layered: Layered, override: Override, key: str) -> None:
    """Delete one key; ``~key=value`` only if it has that value."""
    text, expected = str(override.input_line), override.value()
    there, value = lookup(layered.tree, key)
    if not there:
        raise ConfigError(f"override {text!r}: {_unknown(layered, key)}")
    if expected is not None and expected != value:
        raise ConfigError(f"override {text!r}: {key} is {value!r}, so it is not deleted; write ~{key}")
    parent = key.rpartition(".")[0]
    if parent and not isinstance(lookup(layered.tree, parent)[1], dict):
        raise ConfigError(f"override {text!r}: an item of a list cannot be deleted; set the whole list")
    layered.remove(key)


def _unknown(layered: Layered, key: str) -> str:
    """Say that a key is not there, and what may have been meant."""
    recipe = layered.files[-1]
    if key in schema_keys() or is_free_form(key.rpartition(".")[0]):
        return f"{recipe} does not set {key}; +{key}=… adds it"
    return f"{recipe} has no key {key}{valid_names(key)}"
