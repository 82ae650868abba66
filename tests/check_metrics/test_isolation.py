# SPDX-License-Identifier: Apache-2.0
"""The checker runs where only click and rich are installed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.check_metrics.helpers import write_metrics

ROOT = Path(__file__).parents[2]

# What rich and click bring along; neither of rich's two is needed for a table.
ALLOWED = {"check_metrics", "click", "rich", "markdown_it", "mdurl", "pygments", "sitecustomize"}

GUARD = f"""
import sys


class Guard:
    allowed = {ALLOWED!r} | set(sys.stdlib_module_names)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ImportError(f"{{name}} is not among the checker's dependencies")
        return None


sys.meta_path.insert(0, Guard())
"""


def run_guarded(folder: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Python with every import refused that is neither the standard library's nor click's or rich's."""
    (folder / "sitecustomize.py").write_text(GUARD, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_the_guard_guards(tmp_path: Path) -> None:
    assert "not among the checker's dependencies" in run_guarded(tmp_path, "-c", "import numpy").stderr


def test_every_feature_without_other_packages(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "m.json", {"x": {1: 1.0, 2: 2.0}})
    call = ("-m", "check_metrics", metrics, 'mean(data["x"]) < 2', 'max(data["x"]) < 2')
    for options in ((), ("--json", "--github"), ("--junit", tmp_path / "j.xml"), ("--jq", ".")):
        done = run_guarded(tmp_path, *call, *options)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr


def test_import_is_light(tmp_path: Path) -> None:
    code = "import check_metrics, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = run_guarded(tmp_path, "-c", code).stdout.split()
    assert "check_metrics" in loaded
    assert not {"rich", "click", "torch", "numpy", "lora_suite"} & set(loaded)
