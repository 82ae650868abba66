# SPDX-License-Identifier: Apache-2.0
"""The dotted keys that the schema knows, as a recipe writes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from lora_suite.config.schema import Recipe

FREE_FORM = ("env_vars", "automodel_kwargs", "chat_template_kwargs")


@cache
def schema_keys() -> frozenset[str]:
    """Return every key of a recipe, blocks included, dotted, under the names of the YAML (``_v2``)."""
    return frozenset(_walk(Recipe, ""))


def is_free_form(key: str) -> bool:
    """Whether the block `key` takes any keys (environment variables, arguments handed on)."""
    return any(part in FREE_FORM for part in key.split("."))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the keys of one block and of the blocks below it."""
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        yield key
        for block in _blocks(info.annotation):
            yield from _walk(block, f"{key}.")


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the block types in a field's annotation, such as `Dataset` in ``Dataset | None``."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
