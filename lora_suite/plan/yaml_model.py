# SPDX-License-Identifier: Apache-2.0
"""A YAML file read into a strict model, with errors that name file, line, key and the nearest known key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import nearest
from lora_suite.config.yaml_source import YamlFile, read_yaml

Blocks = Mapping[int | str, type[BaseModel]]
"""The model of each block of a file, by the key that the block stands under."""


ModelType = TypeVar("ModelType", bound=BaseModel)


def read_model(path: Path, model: type[ModelType], blocks: Blocks) -> ModelType:
    """Read and check one file; raises ConfigError with a line for each thing that is wrong."""
    source = read_yaml(path)
    try:
        return model.model_validate(source.tree)
    except ValidationError as error:
        told = (_message(source, detail, model, blocks) for detail in error.errors())
        raise ConfigError("\n".join(told)) from error


def _message(source: YamlFile, detail: Any, model: type[BaseModel], blocks: Blocks) -> str:
    """One line for one thing that pydantic found, with the nearest key where a key is unknown."""
    location = detail["loc"]
    key = ".".join(str(part) for part in location)
    line = source.lines.get(str(location[0]) if location else "", 0)
    where = f"{source.path}:{line}" if line else f"{source.path}"
    if detail["type"] == "extra_forbidden":
        fields = _fields(location, model, blocks)
        close = nearest(str(location[-1]), fields)
        hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(fields)}"
        return f"{where}: unknown key {key}{hint}"
    return f"{where}: {key}: {detail['msg'].removeprefix('Value error, ')}"


def _fields(location: tuple[int | str, ...], model: type[BaseModel], blocks: Blocks) -> list[str]:
    """The keys that are valid in the block where a location lies."""
    inner = [blocks[part] for part in location[:-1] if part in blocks]
    return list((inner[-1] if inner else model).model_fields)
