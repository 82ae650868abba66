# SPDX-License-Identifier: Apache-2.0
"""The code as it was submitted, in a folder of its own: a job may begin hours after its tree has changed.

A snapshot belongs to one results folder and is made anew for each: none is ever used again, so none can be
another state than the one that it is named by.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import lora_suite
from lora_suite.config.errors import ConfigError
from lora_suite.launch.starter import FOLDERS

UNTRACKED_LIMIT_MIB = 64
_DIGITS = 12


class Snapshot(BaseModel):
    """Code that jobs run. folder: where it lies. source: the tree it was made of.

    commit: of that tree, None where it is in no git repository. changes: hash of what differs from the commit
    (of all files, without one), empty where nothing does. is_program: whether the program itself is in it,
    and is to be taken from there.
    """

    model_config = ConfigDict(extra="forbid")

    folder: Path
    source: Path
    commit: str | None
    changes: str
    is_program: bool

    def moved(self, path: Path) -> Path:
        """Where a path of the source lies in the snapshot."""
        return self.folder / path.resolve().relative_to(self.source)

    def remove(self, *others: Path) -> None:
        """Remove the folder and other checkouts of its repository, and git's note of them."""
        for folder in (self.folder, *others):
            if self.commit is not None:
                _git(self.source, "worktree", "remove", "--force", str(folder), check=False)
            shutil.rmtree(folder, ignore_errors=True)


def state_of(folder: Path) -> str | None:
    """The commit of a folder's repository and a hash of its tracked files' changes; None outside git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        return f"{commit}-{hashlib.sha256(_git(folder, 'diff', '--binary', 'HEAD')).hexdigest()[:_DIGITS]}"
    except ConfigError:
        return None


def take(suite: Path, parent: Path, leave_out: Sequence[Path]) -> Snapshot:
    """Make a snapshot of the tree in which a suite lies, in a new folder below `parent`.

    In a git repository it is a worktree of the commit with all changes of tracked files and the untracked
    files that git does not ignore; else a copy of the suite's recipes, scripts and suites. leave_out: folders
    whose untracked files are no code (results). Raises ConfigError where that fails, also for untracked files
    of more than `UNTRACKED_LIMIT_MIB`.
    """
    top = _top(suite)
    return _copied(suite, parent) if top is None else _checked_out(top, parent, leave_out)


def check_out(top: Path, commit: str, parent: Path) -> Path:
    """Check another commit of a repository out, in a new folder below `parent`; raises ConfigError."""
    folder = parent / f"{commit[:_DIGITS]}-reference"
    folder.parent.mkdir(parents=True, exist_ok=True)
    _git(top, "worktree", "add", "--detach", "--quiet", str(folder), commit)
    return folder


def _checked_out(top: Path, parent: Path, leave_out: Sequence[Path]) -> Snapshot:
    commit = _git(top, "rev-parse", "HEAD").decode().strip()
    diff = _git(top, "diff", "--binary", "--full-index", "HEAD")
    untracked = _untracked(top, [*leave_out, parent])
    changes = _hash(diff, top, untracked) if diff or untracked else ""
    folder = parent / f"{commit[:_DIGITS]}-{changes or 'clean'}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    _git(top, "worktree", "add", "--detach", "--quiet", str(folder), commit)
    if diff:
        _git(folder, "apply", "--binary", "--whitespace=nowarn", "-", given=diff)
    for path in untracked:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(top / path, folder / path, follow_symlinks=False)
    return Snapshot(
        folder=folder,
        source=top,
        commit=commit,
        changes=changes,
        is_program=Path(lora_suite.__file__).resolve().is_relative_to(top)
        and (folder / "lora_suite" / "__init__.py").is_file(),
    )


def _copied(suite: Path, parent: Path) -> Snapshot:
    top = suite.resolve().parent.parent
    files = [
        path.relative_to(top)
        for name in FOLDERS
        for path in sorted((top / name).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    changes = _hash(b"", top, files)
    folder = parent / f"no-commit-{changes}"
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(top / path, folder / path)
    return Snapshot(folder=folder, source=top, commit=None, changes=changes, is_program=False)


def _untracked(top: Path, leave_out: Sequence[Path]) -> list[Path]:
    listed = _git(top, "ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")
    out = [path.resolve() for path in leave_out]
    found = [
        Path(name) for name in listed if name and not any((top / name).is_relative_to(path) for path in out)
    ]
    size = sum((top / path).lstat().st_size for path in found)
    if size > UNTRACKED_LIMIT_MIB << 20:
        raise ConfigError(
            f"{top}: {len(found)} untracked files of {size >> 20} MiB would be copied for the jobs; commit "
            f"them, or let .gitignore leave them out"
        )
    return found


def _hash(diff: bytes, top: Path, files: Sequence[Path]) -> str:
    """Hash of a diff, and of files with their names."""
    digest = hashlib.sha256(diff)
    for path in files:
        digest.update(f"\0{path}\0".encode())
        digest.update((top / path).read_bytes() if (top / path).is_file() else b"")
    return digest.hexdigest()[:_DIGITS]


def _top(suite: Path) -> Path | None:
    """Root of the repository in which a suite lies, None where there is none with a commit."""
    folder = suite.resolve().parent
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip())
        _git(folder, "ls-files", "--error-unmatch", "--", suite.resolve().name)
        _git(top, "rev-parse", "--verify", "HEAD")
    except ConfigError:
        return None
    return top.resolve()


def _git(folder: Path, *arguments: str, given: bytes = b"", check: bool = True) -> bytes:
    """What git prints; raises ConfigError with what it says of a failure."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], input=given, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError("git is missing: install it") from error
    if check and done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise ConfigError(f"{folder}: {said[-1]}")
    return done.stdout
