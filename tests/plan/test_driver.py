# SPDX-License-Identifier: Apache-2.0
"""What a driver declares, as the planner reads it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan import driver as driver_module
from lora_suite.plan.driver import read_driver
from tests.plan.conftest import BASE, SIMPLE, Project

WAIVED = """\
declare_case steps=30 minutes=3
train "$@"
waive reason=r issue=https://example.org/1 owner=o until=2026-03-31 revert_to='max(data["x"]) < 1'
check 'max(data["x"]) < 2'
check --on H200 'max(data["y"]) < 3' \\
  --on H100 'max(data["y"]) < 4'
"""


def driver_path(project: Project, body: str) -> Path:
    project.case(BASE, driver=body)
    return project.root / "scripts" / f"{BASE}.sh"


def test_declarations_with_lines_and_conditions(project: Project) -> None:
    path = driver_path(project, WAIVED)
    record = read_driver(path, ["a=[1, 2]"])
    assert (record.steps, record.minutes, record.train) == (30, 3.0, [["a=[1, 2]"]])
    first, second, third = record.declared_checks(path, date(2026, 1, 1))
    assert (first.expression, first.line, first.file) == ('max(data["x"]) < 2', 6, path)
    assert first.waiver is not None
    assert (first.waiver.until, first.waiver.owner) == (date(2026, 3, 31), "o")
    assert (second.on, second.line, second.call) == ("H200", 7, 7)
    # The expression stands on the second line of the same call.
    assert (third.on, third.line, third.call) == ("H100", 8, 7)


def test_a_driver_is_run_once_until_it_or_what_it_sources_changes(project: Project) -> None:
    """Planning and linting a suite both ask, and each answer takes a shell."""
    runs = project.root / "runs"
    body = SIMPLE + f"echo ran >> {runs}\n"
    path = driver_path(project, body)
    assert read_driver(path).steps == read_driver(path).steps == 30
    assert runs.read_text() == "ran\n"
    read_driver(path, ["a=1"])
    assert runs.read_text() == "ran\n" * 2
    driver_path(project, body.replace("steps=30", "steps=40"))
    assert read_driver(path).steps == 40
    common = project.root / "scripts" / "common.sh"
    common.write_text(common.read_text() + "\n")
    read_driver(path)
    assert runs.read_text() == "ran\n" * 4


def test_expired_waiver_brings_the_old_limit_back(project: Project) -> None:
    path = driver_path(project, WAIVED)
    record = read_driver(path)
    assert record.declared_checks(path, date(2026, 3, 31))[0].expression == 'max(data["x"]) < 2'
    assert record.declared_checks(path, date(2026, 4, 1))[0].expression == 'max(data["x"]) < 1'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("declare_case steps=x minutes=3\n", "does not plan: .*steps='x'"),
        ("exit 7\n", "does not plan: exit status 7"),
        ("trap - EXIT\n", "did not end with a record"),
        (
            "declare_case steps=3 minutes=3\ntrain\n"
            "waive reason=r issue=i owner=o until=2026-02-30 revert_to=x\n"
            "check 'max(data[\"x\"]) < 2'\n",
            "until",
        ),
    ],
)
def test_driver_that_does_not_plan_is_named(project: Project, body: str, message: str) -> None:
    path = driver_path(project, body)
    with pytest.raises(ConfigError, match=message) as caught:
        read_driver(path)
    assert str(path) in str(caught.value)


def test_driver_that_hangs_is_given_up(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "TIMEOUT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="planning took more than"):
        read_driver(driver_path(project, "exec sleep 20\n"))


def test_planning_leaves_nothing_in_the_current_folder(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORA_SUITE_RUN_DIR", str(tmp_path / "run"))
    before = sorted(tmp_path.rglob("*"))
    read_driver(driver_path(project, WAIVED + "touch here\n"))
    assert sorted(path for path in tmp_path.rglob("*") if BASE not in path.name) == before
