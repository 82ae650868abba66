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

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lora_suite.config.errors import ConfigError
from lora_suite.config.yaml_source import YamlFile, read_yaml

MARKER = "_override_"
# Other names under which the field's recipes write a block, as (parent, other name, name here).
ALIASES = (("policy.megatron_cfg", "peft", "lora_cfg"),)


@dataclass
class Layered:
    """A tree in the making: the merged values, and for each dotted key where it was set last."""

    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    origins: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        """The merged values as plain data, interpolations still unresolved."""
        container = OmegaConf.to_container(self.config, resolve=False)
        assert isinstance(container, dict)
        return {str(key): value for key, value in container.items()}

    def merge(self, file: YamlFile) -> None:
        """Merge one file's own keys over what is there."""
        own, lines = rename_aliases(file.tree, file.lines, str(file.path))
        for key in _take_markers(own, lines, file.path):
            if key == "" or lookup(self.tree, key)[0]:
                self.remove(key)
        for key, line in lines.items():
            if not isinstance(lookup(own, key)[1], dict):
                self.forget(key)
            self.origins[key] = f"{file.path}:{line}"
        try:
            merged = OmegaConf.unsafe_merge(self.config, OmegaConf.create(rename_references(own)))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{file.path}: {str(error).strip().splitlines()[0]}") from error
        assert isinstance(merged, DictConfig)
        self.config = merged
        for key in lines:
            if lookup(own, key)[1] == MISSING:  # a merge would keep what was inherited
                OmegaConf.update(self.config, key, MISSING)
        self.files.append(file.path)

    def remove(self, key: str) -> None:
        """Remove a key that is there ("": everything), and where it was set."""
        parent, _, last = key.rpartition(".")
        if key:
            block = OmegaConf.select(self.config, parent) if parent else self.config
            del block[last]
        else:
            self.config.clear()
        self.forget(key)

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


def lookup(tree: Any, key: str) -> tuple[bool, Any]:
    """Return whether the dotted key is in a plain tree (list positions count as words), and its value."""
    node = tree
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return False, None
    return True, node
