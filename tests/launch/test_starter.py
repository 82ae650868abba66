# SPDX-License-Identifier: Apache-2.0
"""The starter set, as `lora-suite init` copies it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.launch import starter
from lora_suite.plan import load_plan

ROOT = Path(__file__).resolve().parents[2]


def test_copy_is_complete_and_plans(tmp_path: Path) -> None:
    written = starter.init(tmp_path / "new" / "suite")
    copies = {path.relative_to(tmp_path / "new" / "suite") for path in written}
    listed = subprocess.run(
        ["git", "ls-files", *starter.FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {str(path) for path in copies} >= set(listed.stdout.split())
    assert all(os.access(path, os.X_OK) for path in written if path.suffix == ".sh")
    assert len(load_plan(tmp_path / "new" / "suite" / "suites" / "smoke.yaml").runs) == 16


def test_nothing_is_overwritten_or_half_written(tmp_path: Path) -> None:
    mine = tmp_path / "suites" / "smoke.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"suites/smoke\.yaml"):
        starter.init(tmp_path)
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suites"]


def test_unwritable_target_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        starter.init(tmp_path / "file" / "below")


def test_packaged_set_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the wheel the set lies inside the package; in a source tree beside it."""
    assert starter.root() == ROOT
    package = tmp_path / "lora_suite"
    (package / "starter" / "suites").mkdir(parents=True)
    monkeypatch.setattr(starter, "__file__", str(package / "launch" / "starter.py"))
    assert starter.root() == package / "starter"
