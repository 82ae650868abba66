# SPDX-License-Identifier: Apache-2.0
"""The starter set: recipes, drivers, suites and a nightly job that come with the package."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from lora_suite.config.errors import ConfigError

FOLDERS = ("recipes", "scripts", "suites", "nightly")


def root() -> Path:
    """The folder that holds the folders of the set: in the package, else the source tree."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "starter"
    return packaged if packaged.is_dir() else package.parent


def init(directory: Path) -> list[Path]:
    """Copy the starter set into `directory` and return the files written; drivers become executable.

    Raises ConfigError, before anything is written, if a file is there already.
    """
    pairs = [(source, directory / source.relative_to(root())) for source in _files()]
    present = [str(target) for _, target in pairs if target.exists()]
    if present:
        raise ConfigError(f"{directory}: nothing is overwritten; move these away first: {', '.join(present)}")
    try:
        for source, target in pairs:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if target.suffix == ".sh":
                target.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error}") from error
    return [target for _, target in pairs]


def _files() -> Iterator[Path]:
    """Every file of the starter set."""
    for folder in FOLDERS:
        for path in sorted((root() / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
