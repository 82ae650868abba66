# SPDX-License-Identifier: Apache-2.0
"""The folders of nights: a new one for each, never two jobs at once, and which of the old ones go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.history.store import Store
from lora_suite.plan.nightly_file import Keep

NIGHT = "night.json"
_LOCK = ".lock"
_STAMP = "%Y-%m-%d-%H%M%S"
_NAME = re.compile(r"\d{4}-\d{2}-\d{2}-\d{6}")


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the lock of the nights in `root` within the block.

    Raises ConfigError if another job holds it. The lock is the operating system's and ends with the process,
    however that ends, so no file that is left behind locks anybody out.
    """
    path = root / _LOCK
    try:
        root.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; choose another `results` folder") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise ConfigError(f"{path}: {holder} is still at work here; nothing runs twice") from error
        stream.truncate(0)
        stream.write(f"the nightly job with pid {os.getpid()}\n")
        stream.flush()
        yield


def new_folder(root: Path, now: datetime) -> Path:
    """Create the folder of a night that begins now; raises ConfigError."""
    folder = root / now.strftime(_STAMP)
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    return folder


def outdated(root: Path, keep: Keep, now: datetime, spared: frozenset[str]) -> list[Path]:
    """The folders of nights that need not stay, oldest first.

    Only folders that a finished night left count. spared: names of suite runs; whatever night holds one of
    them stays, and takes nobody's place among the newest.
    """
    nights = sorted(
        path
        for path in root.iterdir()
        if _NAME.fullmatch(path.name) and not path.is_symlink() and (path / NIGHT).is_file()
    )
    free = [night for night in nights if spared.isdisjoint(_suite_runs(night))]
    too_many = free[: -keep.nights] if keep.nights is not None else []
    oldest = now.replace(tzinfo=None) - timedelta(days=keep.days) if keep.days is not None else datetime.min
    return [night for night in free if night in too_many or datetime.strptime(night.name, _STAMP) < oldest]


def remove_outdated(root: Path, keep: Keep, now: datetime, history: Path) -> list[str]:
    """Delete the folders of nights that need not stay; return what to say of it, a line each.

    Where it cannot be known what baselines name, nothing is deleted.
    """
    try:
        spared = _named_by_baselines(history)
    except ConfigError as error:
        return [f"no older night was removed, because the baselines cannot be read: {error}"]
    said = []
    for night in outdated(root, keep, now, spared):
        try:
            shutil.rmtree(night)
            said.append(f"removed the night {night.name}")
        except OSError as error:
            said.append(f"the night {night.name} cannot be removed: {error.strerror}")
    return said


def _named_by_baselines(history: Path) -> frozenset[str]:
    if not history.is_file():
        return frozenset()
    with Store(history) as store:
        return frozenset(baseline.session.name for baseline in store.baselines())


def _suite_runs(night: Path) -> set[str]:
    """Names of the suite runs that a night holds: folders two levels below it."""
    return {path.name for path in night.glob("*/*") if path.is_dir()}
