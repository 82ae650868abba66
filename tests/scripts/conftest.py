# SPDX-License-Identifier: Apache-2.0
"""A folder of recipes and drivers with a stand-in for `lora-suite`, in which real bash runs real drivers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What `lora-suite train` leaves behind, in a few lines; STUB_* variables say what goes wrong.
STUB_TRAINER = """\
import json, os, pathlib, sys
run_dir = pathlib.Path(os.environ["LORA_SUITE_RUN_DIR"])
(run_dir / "argv.json").write_text(json.dumps(sys.argv[1:]))
print("the trainer speaks")
if status := int(os.environ.get("STUB_STATUS", "0")):
    sys.exit(status)
steps = int(os.environ.get("STUB_STEPS", "3"))
tree = {"policy": {"init": "random"}, "sft": {"max_num_steps": 3}, "flag": True}
(run_dir / "recipe.json").write_text(json.dumps({"tree": tree}))
losses = {str(step): 4.0 - step for step in range(1, steps + 1)}
(run_dir / "metrics.json").write_text(json.dumps({"train/loss": losses}))
run_id = os.environ.get("STUB_RUN_ID") or os.environ["LORA_SUITE_RUN_ID"]
environment = {"strict": {"device": os.environ.get("STUB_GPU", "NVIDIA H200")}, "soft": {}}
(run_dir / "run.json").write_text(json.dumps({"run_id": run_id, "environment": environment}))
(run_dir / "ckpts" / "step_3").mkdir(parents=True, exist_ok=True)
"""


@dataclass
class Project:
    """Folders as the drivers expect them; `run` starts one driver."""

    root: Path
    bin: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def driver(self, body: str, stem: str = "sft-x-1n2c-fsdp2") -> Path:
        """Write a driver with this body, and an empty recipe of its name."""
        path = self.root / "scripts" / f"{stem}.sh"
        head = '#!/usr/bin/env bash\nsource "$(dirname "${BASH_SOURCE[0]}")/common.sh"\n'
        path.write_text(head + body)
        (self.root / "recipes" / f"{stem}.yaml").touch()
        return path

    def run(
        self, driver: Path, *words: str, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a driver by hand, with extra environment variables (an empty one is taken out)."""
        environment = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.root),
            "PYTHONPATH": str(ROOT),
            "LORA_SUITE_RUN_DIR": str(self.run_dir),
            **variables,
        }
        return subprocess.run(
            ["bash", str(driver), *words],
            cwd=cwd or self.root,
            env={name: text for name, text in environment.items() if text},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def plan(self, driver: Path, *words: str) -> dict[str, Any]:
        """Return what a driver declares in plan mode."""
        done = self.run(driver, *words, LORA_SUITE_PLAN="1")
        assert done.returncode == 0, done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    def evidence(self) -> dict[str, Any]:
        """Return the checks.json that the last run left."""
        evidence: dict[str, Any] = json.loads((self.run_dir / "checks.json").read_text())
        return evidence


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for folder in ("scripts", "recipes", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "common.sh", tmp_path / "scripts")
    stub = tmp_path / "stub_trainer.py"
    stub.write_text(STUB_TRAINER)
    for name, arguments in (("lora-suite", f'"{stub}"'), ("check_metrics", "-m check_metrics")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        command.chmod(0o755)
    return Project(tmp_path, tmp_path / "bin")
