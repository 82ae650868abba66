# SPDX-License-Identifier: Apache-2.0
"""The nightly job that `lora-suite init` brings: its file, workflow and line for cron, as users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_suite.launch import starter
from lora_suite.plan.nightly_file import read_nightly

BIN = Path(sys.executable).parent
WORKFLOW = starter.root() / "nightly" / "workflow.yml"

# In place of what would install, train for long or need rights: it says how it was called, and leaves what a
# run leaves.
STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  "lora-suite run suites/smoke.yaml"*)
    mkdir -p results/smoke/1 && echo "smoke verdict" > results/smoke/1/report.md ;;
  "lora-suite nightly nightly/nightly.yaml") mkdir -p nights/2 && echo "the night" > nights/2/summary.md ;;
esac
exit "${FAIL:-0}"
"""


def workflow() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())


def steps(job: str) -> Iterator[dict[str, Any]]:
    yield from (step for step in workflow()["jobs"][job]["steps"] if "run" in step)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A starter set, with stand-ins on PATH and in the environment that the workflow makes."""
    folder = tmp_path / "checkout"
    starter.init(folder)
    for bin_folder in (tmp_path / "bin", folder / ".venv" / "bin"):
        bin_folder.mkdir(parents=True)
        for name in ("lora-suite", "pip", "sudo", "python", "python3"):
            path = bin_folder / name
            path.write_text(STAND_IN)
            path.chmod(0o755)
    return folder


def execute(step: dict[str, Any], checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does: bash with -e and pipefail, and files for the job's page and environment."""
    around = {
        **os.environ,
        "PATH": f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(checkout.parent / "calls"),
        "GITHUB_STEP_SUMMARY": str(checkout.parent / "page"),
        "GITHUB_ENV": str(checkout.parent / "env"),
        **{name: str(value) for name, value in workflow()["env"].items()},
        **variables,
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=checkout,
        env=around,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_workflow_is_one_by_githubs_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(WORKFLOW)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lint_of_the_workflow_can_fail(tmp_path: Path) -> None:
    broken = tmp_path / "workflow.yml"
    broken.write_text(WORKFLOW.read_text().replace("runs-on: ubuntu-latest", "run-on: ubuntu-latest"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    assert subprocess.run([*command, str(broken)], capture_output=True, check=False).returncode == 1


def test_every_supported_python_is_tried() -> None:
    declared = (starter.root() / "pyproject.toml").read_text()
    supported = re.findall(r"Python :: (3\.\d+)", declared)
    assert workflow()["jobs"]["smoke"]["strategy"]["matrix"]["python"] == supported


def test_no_expression_gets_into_a_shell() -> None:
    """A title or branch name in `${{ … }}` would be run as a command."""
    assert not [step for job in ("smoke", "nightly") for step in steps(job) if "${{" in step["run"]]


@pytest.mark.parametrize(
    ("job", "calls", "page"),
    [
        (
            "smoke",
            ["lora-suite lint", "lora-suite run suites/smoke.yaml --results results"],
            "smoke verdict\n",
        ),
        (
            "nightly",
            [
                "pip install --quiet lora-suite[all]",
                "lora-suite nightly nightly/nightly.yaml --plan",
                "lora-suite nightly nightly/nightly.yaml",
            ],
            "the night\n",
        ),
    ],
)
def test_the_steps_of_a_job_run(checkout: Path, job: str, calls: list[str], page: str) -> None:
    for step in steps(job):
        done = execute(step, checkout)
        assert done.returncode == 0, (step["name"], done.stderr)
    called = (checkout.parent / "calls").read_text().splitlines()
    for call in calls:
        assert [line for line in called if line.startswith(call)], (call, called)
    assert (checkout.parent / "page").read_text() == page


def test_the_night_is_found_for_the_artefacts(checkout: Path) -> None:
    for step in steps("nightly"):
        execute(step, checkout)
    assert (checkout.parent / "env").read_text() == "NIGHT=nights/2\n"


@pytest.mark.parametrize("job", ["smoke", "nightly"])
def test_a_bad_exit_code_fails_its_step(checkout: Path, job: str) -> None:
    failed = [step["name"] for step in steps(job) if execute(step, checkout, FAIL="5").returncode == 5]
    assert failed[-1] == {"smoke": "Run the smoke suite", "nightly": "Run the night"}[job]


def test_the_job_s_file_is_read_and_planned_for_real(tmp_path: Path) -> None:
    starter.init(tmp_path)
    assert len(read_nightly(tmp_path / "nightly" / "nightly.yaml").suites) == 2
    command = [str(BIN / "lora-suite"), "nightly", "nightly/nightly.yaml", "--plan"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    # 16 runs of 2 processes for 3 minutes.
    assert lines[0] == "smoke: 16 runs, 3 pairs, at most 48 minutes and 1.6 GPU-hours"
    assert lines[-1] == "cap: 12 GPU-hours; what does not fit is MISSING"
    assert not (tmp_path / "nights").exists()


def test_the_line_for_cron_runs(checkout: Path) -> None:
    text = (checkout / "nightly" / "crontab").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z_]+=", line))
    (entry,) = [line for line in lines if not re.match(r"[A-Z_]+=", line)]
    *when, command = entry.split(maxsplit=5)
    assert [bool(re.fullmatch(r"\*|\d+", field)) for field in when] == [True] * 5
    environment = {**variables, "LORA_SUITE": str(checkout), "CALLS": str(checkout.parent / "calls")}
    done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (checkout.parent / "calls").read_text() == "lora-suite nightly nightly/nightly.yaml\n"
