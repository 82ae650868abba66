# SPDX-License-Identifier: Apache-2.0
"""Where a file that a recipe names is found."""

from __future__ import annotations

from pathlib import Path

from lora_suite.config.layers import inherited_folders


def search_folders(recipe_path: Path) -> list[Path]:
    """Return the folders that a relative path in a recipe may count from, in the order of the search.

    They are the recipe's own folder, the folders of the files it inherits from (nearest first), and the
    current directory.
    """
    return [*inherited_folders(recipe_path), Path.cwd()]


def locate(value: str, recipe_path: Path) -> Path | None:
    """Return the file or folder that a recipe names by `value`, absolute, or None if there is none."""
    path = Path(value).expanduser()
    if path.is_absolute():
        return path if path.exists() else None
    for folder in search_folders(recipe_path):
        if (folder / path).exists():
            return (folder / path).resolve()
    return None
