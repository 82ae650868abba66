# SPDX-License-Identifier: Apache-2.0
"""A git repository's commits, and checkouts of them beside its own working tree."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.errors import ConfigError


@dataclass(frozen=True)
class Commit:
    """A commit: its whole hash and the first line of its message."""

    sha: str
    subject: str

    def __str__(self) -> str:
        """As people name it."""
        return f"{self.sha[:10]} {self.subject}"


class Repository:
    """The repository that a path lies in. `top` is its root. Raises ConfigError where there is none."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        try:
            self.top = Path(_git(folder, "rev-parse", "--show-toplevel"))
        except ConfigError as error:
            raise ConfigError(
                f"{path}: lies in no git repository that could be searched ({error})"
            ) from error

    def commit(self, revision: str) -> Commit:
        """A revision as people write it; raises ConfigError for one that is not there."""
        try:
            said = _git(self.top, "log", "-1", "--format=%H %s", revision, "--")
        except ConfigError as error:
            raise ConfigError(f"{revision}: is no commit of {self.top} ({error})") from error
        return _commit(said)

    def between(self, good: Commit, bad: Commit) -> list[Commit]:
        """The commits after `good` up to `bad`, oldest first; of a merge its first parents' line alone.

        Raises ConfigError if `bad` does not come after `good`.
        """
        if _git(self.top, "merge-base", good.sha, bad.sha) != good.sha:
            raise ConfigError(f"--good {good.sha[:10]}: is no ancestor of --bad {bad.sha[:10]}")
        listed = _git(
            self.top, "log", "--first-parent", "--reverse", "--format=%H %s", f"{good.sha}..{bad.sha}"
        )
        if not listed:
            raise ConfigError("--good and --bad are the same commit")
        return [_commit(line) for line in listed.splitlines()]

    @contextlib.contextmanager
    def checkout(self, commit: Commit) -> Iterator[Path]:
        """A checkout of a commit in a folder of its own, which is gone afterwards, however the block ends."""
        folder = Path(tempfile.mkdtemp(prefix="lora-suite-bisect-")) / self.top.name
        try:
            _git(self.top, "worktree", "add", "--detach", "--quiet", str(folder), commit.sha)
            yield folder
        finally:
            with contextlib.suppress(ConfigError):
                _git(self.top, "worktree", "remove", "--force", str(folder))
            shutil.rmtree(folder.parent, ignore_errors=True)


def _commit(line: str) -> Commit:
    sha, _, subject = line.partition(" ")
    return Commit(sha, subject)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; raises ConfigError with what it says of a failure."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError("git is missing: install it") from error
    if done.returncode != 0:
        raise ConfigError((done.stderr.strip().splitlines() or ["git failed"])[-1])
    return done.stdout.strip()
