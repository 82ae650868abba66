# SPDX-License-Identifier: Apache-2.0
"""Which commit a trainer's code is of, where it lies in a git repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

_TIMEOUT_SECONDS = 10.0


def commit_of(folder: Path) -> str | None:
    """Commit of the repository that `folder` belongs to, with `+` where tracked files have changes.

    None outside git, without git, and for a folder that git doesn't track (a virtual environment within a
    repository): the repository's commit says nothing of it.
    """
    tracked = _git(folder, "ls-files", "--", ".")
    commit = _git(folder, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return None
    return f"{commit}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
