# SPDX-License-Identifier: Apache-2.0
"""Inheritance: a recipe file and the files it names under ``defaults:``, merged into one tree.

``defaults:`` is a file or a list of files, each resolved from the folder of the file that names it, and may
have ``defaults:`` of its own. Later files win over earlier ones, the recipe wins over all of them, blocks
merge key by key, lists replace lists. ``_override_: true`` in a block, at any depth, drops what was inherited
for that block before it merges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lora_suite.config.errors import ConfigError
from lora_suite.config.yaml_source import YamlFile, read_yaml

MARKER = "_override_"
# Other names under which the field's recipes write a block, as (parent, other name, name here).
ALIASES = (("policy.megatron_cfg", "peft", "lora_cfg"),)


@dataclass
class Layered:
    """A tree in the making: the merged values, and for each dotted key where it was set last."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    def merge(self, file: YamlFile) -> None:
        """Merge one file's own keys over what is there."""
        own, lines = rename_aliases(file.tree, file.lines, str(file.path))
        dropped = _take_markers(own, lines, file.path)
        for key in dropped:
            _drop(self.tree, key)
            self.forget(key)
        for key, line in lines.items():
            if not _is_block(own, key):
                self.forget(key)
            self.origins[key] = f"{file.path}:{line}"
        try:
            merged = OmegaConf.merge(OmegaConf.create(self.tree), OmegaConf.create(own))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{file.path}: {str(error).strip().splitlines()[0]}") from error
        self.tree = plain(merged)
        self.files.append(file.path)

    def forget(self, key: str) -> None:
        """Forget where `key` and everything below it was set."""
        for known in [name for name in self.origins if name == key or name.startswith(f"{key}.") or not key]:
            del self.origins[known]


def read_layers(path: Path) -> Layered:
    """Read a recipe and everything it inherits. Raises ConfigError for missing files and cycles."""
    layered = Layered()
    for file in _chain(path, ()):
        layered.merge(file)
    return layered


def inherited_folders(path: Path) -> list[Path]:
    """Return the folders of the recipe and of all files it inherits from, nearest first, without repeats."""
    folders = [file.path.resolve().parent for file in _chain(path, ())]
    return list(dict.fromkeys(reversed(folders)))


def _chain(path: Path, chain: tuple[Path, ...]) -> list[YamlFile]:
    """Return the files that `path` inherits from, depth first, then `path` itself; without ``defaults``."""
    identity = path.resolve()
    if identity in chain:
        names = " -> ".join(str(link) for link in (*chain[chain.index(identity) :], identity))
        raise ConfigError(f"{path}: `defaults:` goes round in a circle: {names}")
    file = read_yaml(path)
    parents = file.tree.pop("defaults", [])
    line = file.lines.pop("defaults", 0)
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}:{line}: `defaults` must be a file name or a list of file names")
    files = []
    for parent in parents:
        parent_path = path.parent / parent
        if not parent_path.is_file():
            raise ConfigError(
                f"{path}:{line}: `defaults` names {parent}, but there is no file {parent_path}; "
                f"paths count from the folder of the file that names them"
            )
        files += _chain(parent_path, (*chain, identity))
    return [*files, file]


def rename_aliases(
    tree: dict[str, Any], lines: dict[str, int], where: str
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the tree and its lines with blocks under another accepted name put under the name used here."""
    for parent, other, name in ALIASES:
        block: Any = tree
        for part in parent.split("."):
            block = block.get(part) if isinstance(block, dict) else None
        if not isinstance(block, dict) or other not in block:
            continue
        if name in block:
            raise ConfigError(
                f"{where}: {parent}.{other} is another name of {parent}.{name}; write one of them"
            )
        block[name] = block.pop(other)
        lines = {rename_key(key): line for key, line in lines.items()}
    return tree, lines


def rename_key(key: str) -> str:
    """Return the dotted key with other accepted names replaced by the names used here."""
    for parent, other, name in ALIASES:
        old = f"{parent}.{other}"
        if key == old or key.startswith(f"{old}."):
            return f"{parent}.{name}{key[len(old) :]}"
    return key


def rename_references(value: Any) -> Any:
    """Return a tree in which interpolations refer to blocks under the names used here."""
    if isinstance(value, dict):
        return {key: rename_references(below) for key, below in value.items()}
    if isinstance(value, list):
        return [rename_references(item) for item in value]
    if isinstance(value, str) and "${" in value:
        for parent, other, name in ALIASES:
            value = re.sub(rf"\$\{{{re.escape(parent)}\.{other}\b", f"${{{parent}.{name}", value)
    return value


def _take_markers(block: Any, lines: dict[str, int], path: Path, prefix: str = "") -> list[str]:
    """Remove every ``_override_`` marker below `block`; return the dotted keys of the blocks marked true."""
    if not isinstance(block, dict):
        return []
    marked = []
    if MARKER in block:
        value = block.pop(MARKER)
        line = lines.pop(f"{prefix}.{MARKER}".lstrip("."), 0)
        if not isinstance(value, bool):
            raise ConfigError(f"{path}:{line}: {prefix}.{MARKER} must be true or false, not {value!r}")
        if value:
            marked.append(prefix)
    for key, below in block.items():
        marked += _take_markers(below, lines, path, f"{prefix}.{key}".lstrip("."))
    return marked


def _drop(tree: dict[str, Any], key: str) -> None:
    """Remove the block `key` ("" for all) from the tree, if it is there."""
    if not key:
        tree.clear()
        return
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)


def _is_block(tree: dict[str, Any], key: str) -> bool:
    """Whether the dotted key names a block of this file rather than a value."""
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return isinstance(node, dict)


def plain(config: Any) -> dict[str, Any]:
    """Return an OmegaConf tree as plain values, interpolations still unresolved."""
    container = OmegaConf.to_container(config, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
