# SPDX-License-Identifier: Apache-2.0
"""The architecture that ``policy.model_name`` means: a JSON file, a folder, or a hub name with a local JSON.

A hub name needs no network where a file in a ``models/`` folder beside the recipe (or beside a file that it
inherits from) states it as its ``_name_or_path``, which is where transformers writes a model's name. Case
does not matter, nor do ``-Base`` and ``-Instruct``: those models share their shape.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.config.paths import locate, search_folders


def find_config(model_name: str, recipe_path: Path) -> Path | None:
    """Return the JSON file of a model's architecture, absolute, or None if it is not on this machine.

    model_name: a path to a JSON file, a folder with ``config.json``, or a hub name. Relative paths count from
    the recipe's folder first (see `paths.search_folders`).
    """
    path = locate(model_name, recipe_path)
    if path is not None and path.is_dir():
        path = path / "config.json" if (path / "config.json").is_file() else None
    if path is not None:
        return path
    for folder in search_folders(recipe_path):
        for candidate in sorted((folder / "models").glob("*.json")):
            if _release(str(read_config(candidate).get("_name_or_path", ""))) == _release(model_name):
                return candidate
    return None


def _release(model_name: str) -> str:
    """Return the name without case and without what tells tuned models of one shape apart."""
    return re.sub(r"-(base|instruct)(?=-|$)", "", model_name.lower())


def read_config(path: Path) -> dict[str, Any]:
    """Read a model's JSON. Raises ConfigError if it is not a JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a model's configuration is a JSON object, not a list or a single value")
    return config


def known_models(recipe_path: Path) -> list[str]:
    """Return what ``models/`` folders offer `find_config`: file paths, and the hub names that they state."""
    names = []
    for folder in search_folders(recipe_path):
        for path in sorted((folder / "models").glob("*.json")):
            names += [f"models/{path.name}", str(read_config(path).get("_name_or_path", ""))]
    return list(dict.fromkeys(name for name in names if name))
