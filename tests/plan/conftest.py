# SPDX-License-Identifier: Apache-2.0
"""A folder with a suite, recipes that inherit from the real ones, and drivers that declare something."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_suite.plan.load import load_plan
from lora_suite.plan.model import Plan

ROOT = Path(__file__).resolve().parents[2]
BASE = "sft-tiny-llama-1n2c-fsdp2"
SIMPLE = 'declare_case steps=30 minutes=3\ntrain "$@"\ncheck \'data["train/loss"]["30"] < 5\'\n'


@dataclass
class Project:
    """Writes the parts of a project, and plans."""

    root: Path

    def case(self, stem: str, recipe: str = "", driver: str = SIMPLE) -> None:
        """Write a recipe that inherits from the tiny Llama's, and a driver with this body."""
        folder = self.root / "recipes"
        text = f"defaults: {ROOT / 'recipes' / BASE}.yaml\n{recipe}"
        (folder / f"{stem}.yaml").write_text(text)
        head = '#!/usr/bin/env bash\nsource "$(dirname "${BASH_SOURCE[0]}")/common.sh"\n'
        (self.root / "scripts" / f"{stem}.sh").write_text(head + driver)

    def suite(self, text: str) -> Path:
        """Write the suite file."""
        path = self.root / "suites" / "test.yaml"
        path.write_text(text)
        return path

    def plan(self, text: str, **how: object) -> Plan:
        """Write a suite and load it."""
        return load_plan(self.suite(text), **how)  # type: ignore[arg-type]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for folder in ("recipes", "scripts", "suites"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "common.sh", tmp_path / "scripts")
    return Project(tmp_path)
