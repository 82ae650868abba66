# SPDX-License-Identifier: Apache-2.0
"""One YAML file: its values by the rules of YAML 1.2, and the line of every key.

PyYAML follows YAML 1.1, where ``1e-5`` is a string, ``010`` is eight, ``no`` is false and ``12:30`` is 750.
Recipes follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), which reads numbers
as JSON and the override grammar do, so that a number is the same on every route.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lora_suite.config.errors import ConfigError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C one is faster
    """A safe loader that knows the scalars of YAML 1.2's core schema, and merge keys (``<<``)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's way


_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
)
for _kind, _pattern, _first in _SCALARS:
    _starts = ["" if letter == "\0" else letter for letter in _first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _starts)


# Tags that JSON has no word for (binary, set, timestamp, …) are refused like unknown ones.
_CORE = ("str", "bool", "int", "float", "null", "seq", "map")
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _CORE
}


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Read an integer by YAML 1.2: a leading zero does not make it octal."""
    text = str(loader.construct_scalar(node))
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    return int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


@dataclass(frozen=True)
class YamlFile:
    """What a YAML file says: `tree` of plain values, and for each dotted key the line it stands on."""

    path: Path
    tree: dict[str, Any]
    lines: dict[str, int]


def read_yaml(path: Path) -> YamlFile:
    """Read one YAML file whose root is a mapping (an empty file counts as an empty one).

    Raises ConfigError, with file and line, if the file is missing, is not YAML, repeats a key, or has a key
    that is not a string.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return YamlFile(path, {}, {})
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: the file must hold `key: value` pairs, not a list or a single value")
        lines = dict(_lines(path, node, ""))
        return YamlFile(path, loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    finally:
        loader.dispose()


def _lines(path: Path, node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield each dotted key below `node` with its 1-based line; refuse repeated and non-string keys."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if key_node.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{path}:{line}: the key {key_node.value!r} must be a word (quote it)")
        if "." in key_node.value:
            raise ConfigError(f"{path}:{line}: the key {key_node.value!r} has a dot; write nested blocks")
        key = prefix + key_node.value
        if key in seen:
            raise ConfigError(f"{path}:{line}: the key {key} stands twice (first in line {seen[key]})")
        seen[key] = line
        yield key, line
        if isinstance(value_node, yaml.MappingNode):
            yield from _lines(path, value_node, f"{key}.")
