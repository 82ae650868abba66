# SPDX-License-Identifier: Apache-2.0
"""The commit of a trainer's code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lora_suite.launch import code
from lora_suite.launch.code import commit_of


def git(folder: Path, *arguments: str) -> str:
    """Run git as somebody, untouched by this machine's settings."""
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *settings, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "train.py").write_text("x = 1\n")
    git(tmp_path, "add", "trainer")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_and_a_mark_for_changes(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository / "trainer") == head
    (repository / "notes.txt").write_text("untracked")
    assert commit_of(repository / "trainer") == head
    (repository / "trainer" / "train.py").write_text("x = 2\n")
    assert commit_of(repository / "trainer") == f"{head}+"


def test_a_folder_that_git_does_not_track_has_none(repository: Path) -> None:
    packages = repository / ".venv" / "trainer"
    packages.mkdir(parents=True)
    (packages / "train.py").write_text("x = 1\n")
    assert commit_of(packages) is None


def test_outside_git_or_without_it_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path / "nowhere") is None

    def absent(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(code.subprocess, "run", absent)
    assert commit_of(tmp_path) is None
