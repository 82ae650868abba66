# SPDX-License-Identifier: Apache-2.0
"""The package as others install it: a wheel in an empty environment."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, REPOSITORY, cwd=folder
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("lora_suite-*.whl")
    return path


@pytest.fixture(scope="module")
def checker_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the package without its dependencies, plus click and rich."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    binaries = folder / "bin"
    for arguments in (["--no-deps", str(wheel)], ["click", "rich"]):
        installed = run(binaries / "python", "-m", "pip", "install", "--quiet", *arguments, cwd=folder)
        assert installed.returncode == 0, installed.stderr
    return binaries


def test_the_wheel_holds_the_starter_set(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "recipes/sft.yaml",
        "recipes/data/quickstart.jsonl",
        "recipes/models/tiny-llama.json",
        "scripts/common.sh",
        "suites/smoke.yaml",
        "nightly/workflow.yml",
    ):
        assert f"lora_suite/starter/{name}" in names


def test_check_metrics_needs_click_and_rich_alone(checker_environment: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    metrics.write_text(json.dumps({"train/loss": {"1": 2.0, "2": 1.0}}))
    good = run(checker_environment / "check_metrics", metrics, 'mean(data["train/loss"]) < 1.6', cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert "PASS" in good.stdout
    bad = run(checker_environment / "check_metrics", metrics, 'mean(data["train/loss"]) < 1.4', cwd=tmp_path)
    assert bad.returncode == 1
    assert "FAIL" in bad.stdout
