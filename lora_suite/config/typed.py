# SPDX-License-Identifier: Apache-2.0
"""Types after the merge: a resolved tree becomes a `Recipe`, or an error that says what to write instead.

Validation goes through JSON: lists become tuples and whole numbers become floats where a float is meant, but
``true`` is never a number and ``"8"`` never an 8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.config.keys import FREE_FORM, schema_keys
from lora_suite.config.nearest import nearest, nearest_key
from lora_suite.config.schema import Recipe
from lora_suite.config.tree import flatten

_WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
}


def to_recipe(
    tree: Mapping[str, Any],
    failures: Mapping[str, str],
    origin: Callable[[str], str],
    deleted: Mapping[str, str],
) -> Recipe:
    """Type a resolved tree.

    failures: keys that could not be resolved, with the reason; a wrong type elsewhere may be the cause, so
    types are reported first. origin: where a dotted key was set. deleted: keys that overrides deleted, with
    the override. Raises ConfigError that lists every problem, one a line: place, key, and what to write.
    """
    problems = _none_texts(tree)
    try:
        recipe = Recipe.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        for entry in error.errors():
            key = ".".join(str(part) for part in entry["loc"])
            if key not in failures:
                problems.setdefault(key, _problem(entry["type"], key, entry, deleted))
    problems = problems or dict(failures)
    if problems:
        lines = [f"{origin(key)}: {text}" for key, text in problems.items()]
        raise ConfigError("\n".join(sorted(lines, key=lambda line: not line.startswith("override"))))
    return recipe


def _none_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Find values that are the text ``None``, which YAML does not read as null."""
    return {
        key: f"{key} is the text 'None'; write null"
        for key, value in flatten(tree).items()
        if value == "None" and not any(part in FREE_FORM for part in key.split("."))
    }


def _problem(kind: str, key: str, entry: Any, deleted: Mapping[str, str]) -> str:
    """Say what is wrong with one key, and what to write."""
    value = entry["input"]
    if kind == "extra_forbidden":
        return f"unknown key {key}{valid_names(key)}"
    if kind == "missing":
        if isinstance(value, list):
            return f"{key.rpartition('.')[0]} is {json.dumps(value)}, which lacks a value"
        if key in deleted:
            return f"{key} is required, but override {deleted[key]!r} deleted it"
        return f"{key} is required and not set (does the recipe inherit from sft.yaml?)"
    if kind == "literal_error":
        options = str(entry["ctx"]["expected"]).replace("False", "false").replace("True", "true")
        near_option = nearest(str(value), options.replace("'", "").replace(" or ", ", ").split(", "))
        hint = f"; the nearest is {near_option[0]}" if near_option else ""
        return f"{key} is {json.dumps(value)}, but must be {options}{hint}"
    wanted = _WANTED.get(kind)
    if wanted is None:
        return f"{key} is {json.dumps(value)}: {entry['msg'].lower()}"
    return f"{key} must be {wanted}, not {json.dumps(value)}{_remedy(kind, value)}"


def valid_names(key: str) -> str:
    """Return ``; the nearest is …`` for an unknown key, or the names of its block if none comes near."""
    near = nearest_key(key, schema_keys())
    if near is not None:
        return f"; the nearest is {near}"
    parent = key.rpartition(".")[0]
    names = sorted(name.rpartition(".")[2] for name in schema_keys() if name.rpartition(".")[0] == parent)
    return f"; {parent or 'a recipe'} has {', '.join(names)}" if names else ""


def _remedy(kind: str, value: Any) -> str:
    """Say what to write where it can be told from what was written."""
    if kind == "string_type" and not isinstance(value, dict | list):
        return f'; write "{json.dumps(value)}" in quotes if the text is meant' if value is not None else ""
    if isinstance(value, float) and kind == "int_type" and value.is_integer():
        return f"; write {int(value)}"
    if not isinstance(value, str):
        return ""
    word = value.strip().lower()
    if kind == "bool_type":
        if word in ("true", "yes", "on", "1"):
            return "; write true, without quotes"
        return "; write false, without quotes" if word in ("false", "no", "off", "0") else ""
    if kind in ("int_type", "float_type") and _is_number(word):
        return f"; write {value.strip()}, without quotes"
    return ""


def _is_number(text: str) -> bool:
    """Whether the text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
