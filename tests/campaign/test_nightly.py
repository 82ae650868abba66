# SPDX-License-Identifier: Apache-2.0
"""A night of suites on a launcher that writes files in place of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lora_suite.campaign import run
from lora_suite.campaign.folders import alone, outdated
from lora_suite.campaign.nightly import preview_night, run_night
from lora_suite.campaign.ration import NightRation
from lora_suite.campaign.request import Request
from lora_suite.config.errors import ConfigError
from lora_suite.history.baselines import set_baseline
from lora_suite.history.store import Store
from lora_suite.judge.night import NightVerdict, SuiteOutcome
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Plan
from lora_suite.plan.nightly_file import Keep
from tests.campaign.helpers import FakeLauncher, console, printed, slow_lora
from tests.judge.helpers import FULL, make_case, make_plan

MIDNIGHT = datetime(2026, 3, 1, 23, 30)


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """Suites are plans by the stem of their file; one that is not there cannot be planned."""
    known: dict[str, Plan] = {}

    def plan(request: Request) -> Plan:
        stem = request.suite.stem
        if stem not in known:
            raise ConfigError(f"{request.suite}: there is no such suite")
        return known[stem]

    monkeypatch.setattr(Request, "plan", plan)
    monkeypatch.setattr(run, "lint_plan", lambda plan: [])
    return known


class Clock:
    """A clock that goes on by so much whenever somebody looks."""

    def __init__(self, step: timedelta = timedelta(0), now: datetime = MIDNIGHT) -> None:
        self.now, self.step = now, step

    def __call__(self) -> datetime:
        self.now += self.step
        return self.now


@pytest.fixture
def night(tmp_path: Path, plans) -> Callable[..., tuple[int, NightVerdict, str]]:
    """Write a job's file, run it; returns exit code, night.json and what was printed."""

    def go(text: str, launcher: Any = None, clock: Clock | None = None) -> tuple[int, NightVerdict, str]:
        path = tmp_path / "nightly.yaml"
        path.write_text(text)
        screen = console(200)
        before = set(tmp_path.glob("nights/*/night.json"))
        code = run_night(path, launcher or FakeLauncher(), screen, clock or Clock())
        (written,) = set(tmp_path.glob("nights/*/night.json")) - before
        return code, NightVerdict.model_validate_json(written.read_text()), printed(screen)

    return go


def test_suites_run_in_order_into_one_dated_folder(night, plans, tmp_path):
    plans |= {"a": make_plan(suite="a"), "b": make_plan(suite="b")}
    code, verdict, text = night("suites: [suites/b.yaml, suites/a.yaml]\n")
    assert code == 0
    assert [suite.name for suite in verdict.suites] == ["b", "a"]
    folder = tmp_path / "nights" / "2026-03-01-233000"
    assert verdict.directory == str(folder)
    for suite in verdict.suites:
        assert (folder / suite.directory / "report.html").is_file()
        assert suite.counts == {"PASS": 9}
    assert (tmp_path / "nights" / "history.db").is_file()
    assert (folder / "summary.md").read_text().startswith("### Night of 2026-03-01: 2 of 2 suites passed")
    assert text.splitlines()[-1].startswith("exit 0: 2 of 2 suites passed")


def killed(case, planned, run_dir) -> Ended:
    return Ended(how="killed", status=137, message="killed")


def interrupted(case, planned, run_dir) -> Ended:
    return Ended(how="interrupted", status=130, message="interrupted")


@pytest.mark.parametrize(
    ("deeds", "suites", "code", "outcomes"),
    [
        (slow_lora(1.2), "[a]", 1, ["FAIL"]),
        (slow_lora(0.8), "[a]", 5, ["INCONCLUSIVE"]),
        ({(FULL, 1): killed}, "[a]", 3, ["ERROR"]),
        # A suite that cannot be planned stops no other, and wins.
        ({(FULL, 1): killed}, "[gone, a]", 2, ["UNUSABLE", "ERROR"]),
        ({(FULL, 1): interrupted}, "[a, gone]", 130, ["INTERRUPTED", "MISSING"]),
    ],
)
def test_the_worst_suite_decides(night, plans, deeds, suites, code, outcomes):
    plans["a"] = make_plan(suite="a")
    found, verdict, text = night(f"suites: {suites}\n", FakeLauncher(deeds))
    assert (found, [suite.outcome for suite in verdict.suites]) == (code, outcomes)
    assert all(suite.message or suite.problems for suite in verdict.suites)
    assert text.splitlines()[-1].startswith(f"exit {code}: 0 of")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 5], 5), ([5, 1], 1), ([1, 4], 4), ([4, 3], 3), ([3, 2], 2), ([2, 130], 130), ([0, 0], 0)],
)
def test_precedence(codes, expected):
    suites = [SuiteOutcome(name=f"{n}", suite="", exit_code=code, outcome="") for n, code in enumerate(codes)]
    verdict = NightVerdict(started="", seconds=0, host="", directory="", gpu_hours=0, suites=suites)
    assert verdict.exit_code == expected


def test_what_the_window_leaves_no_room_for_is_missing(night, plans):
    """Runs of 3 minutes at most; ten minutes are left, and the clock goes on by one at every look."""
    plans |= {"a": make_plan(suite="a"), "b": make_plan(suite="b")}
    launcher = FakeLauncher()
    clock = Clock(timedelta(minutes=1), MIDNIGHT)
    code, verdict, text = night('suites: [a, b]\nwindow: {begin: "22:00", end: "23:40"}\n', launcher, clock)
    assert code == 4
    assert 0 < len(launcher.ran) < 8
    first, second = verdict.suites
    assert first.outcome == "MISSING"
    assert "the window closes at 23:40, and" in first.message
    assert "may take 3 minutes" in first.message
    assert second.outcome == "MISSING"
    assert "23:40" in "".join([second.message, *second.problems])
    assert "did not run: the window closes at 23:40" in text


def test_outside_of_the_window_nothing_runs(night, plans):
    plans["a"] = make_plan(suite="a")
    launcher = FakeLauncher()
    code, verdict, _ = night('suites: [a]\nwindow: {begin: "01:00", end: "05:00"}\n', launcher)
    assert (code, launcher.ran) == (4, [])
    assert verdict.suites[0].message == "the window from 01:00 to 05:00 was closed"


def test_what_the_gpu_hours_leave_no_room_for_is_missing(night, plans):
    # A run is held to cost 2 processes x 3 minutes = 0.1 until it has ended, then next to nothing.
    plans["a"] = make_plan(suite="a")
    assert make_case(FULL).gpus * make_case(FULL).minutes / 60 == pytest.approx(0.1)
    launcher = FakeLauncher()
    code, verdict, _ = night("suites: [a]\ngpu_hours: 0.09\n", launcher)
    assert (code, launcher.ran) == (4, [])
    assert "of 0.09 GPU-hours 0.09 are left, and" in verdict.suites[0].message
    code, verdict, _ = night("suites: [a]\ngpu_hours: 0.101\n", clock=Clock(now=MIDNIGHT + timedelta(1)))
    assert code == 0
    assert 0 < verdict.gpu_hours < 0.001


def test_runs_under_way_are_held_to_cost_the_most():
    ration = NightRation(None, 0.25, lambda: MIDNIGHT)
    case = make_case(FULL)
    assert [bool(ration.refusal(case)) for _ in range(3)] == [False, False, True]
    ration.spent(case, 90.0)
    assert ration.used == pytest.approx(2 * 90 / 3600)
    assert ration.refusal(case) == ""


def test_plan_runs_nothing(plans, tmp_path):
    plans["a"] = make_plan(suite="a")
    path = tmp_path / "nightly.yaml"
    path.write_text('suites: [a, gone]\ngpu_hours: 0.5\nwindow: {begin: "22:00", end: "06:00"}\n')
    screen = console(200)
    assert preview_night(path, screen, Clock()) == 2
    assert printed(screen).splitlines() == [
        "a: 8 runs, 1 pairs, at most 24 minutes and 0.8 GPU-hours",
        f"gone: cannot run: {tmp_path / 'gone'}: there is no such suite",
        "in all at most 24 minutes and 0.8 GPU-hours",
        "window: 22:00 to 06:00, open now, until 06:00; what does not fit is MISSING",
        "cap: 0.5 GPU-hours; what does not fit is MISSING",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["nightly.yaml"]


def test_two_jobs_never_run_at_once(tmp_path):
    with alone(tmp_path):
        text = f"""
from pathlib import Path
from lora_suite.campaign.folders import alone
with alone(Path({str(tmp_path)!r})):
    pass
"""
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert f"the nightly job with pid {os.getpid()} is still at work here" in done.stderr
    with alone(tmp_path):
        pass


def test_the_lock_of_a_dead_process_locks_nobody_out(tmp_path):
    text = f"""
import os
from pathlib import Path
from lora_suite.campaign.folders import alone
with alone(Path({str(tmp_path)!r})):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 9
    assert (tmp_path / ".lock").read_text().startswith("the nightly job with pid ")
    with alone(tmp_path):
        pass


def nights(root: Path, *names: str) -> None:
    for name in names:
        (root / name / "smoke" / f"run-of-{name}").mkdir(parents=True)
        (root / name / "night.json").write_text("{}")


DAYS = tuple(f"2026-03-{day:02}-020000" for day in (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("keep", "spared", "gone"),
    [
        (Keep(), [], []),
        (Keep(nights=2), [], [1, 2, 3]),
        (Keep(days=3), [], [1, 2]),
        (Keep(nights=4, days=2), [], [1, 2, 3]),
        (Keep(nights=2), [2], [1, 3]),
        (Keep(nights=1), [5], [1, 2, 3]),
    ],
)
def test_which_nights_go(tmp_path, keep, spared, gone):
    nights(tmp_path, *DAYS)
    # What no finished night left is nobody's to remove.
    (tmp_path / "2026-01-01-000000").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "2026-01-02-000000").symlink_to(tmp_path / DAYS[0])
    names = frozenset(f"run-of-{DAYS[day - 1]}" for day in spared)
    found = outdated(tmp_path, keep, datetime(2026, 3, 6, 1, 0), names)
    assert [path.name for path in found] == [DAYS[day - 1] for day in gone]


def test_a_night_that_a_baseline_names_stays(night, plans, tmp_path):
    plans["a"] = make_plan(suite="a")
    job = "suites: [a]\nkeep: {nights: 1}\n"
    first = night(job)[1]
    with Store(tmp_path / "nights" / "history.db") as store:
        set_baseline(store, "released", Path(first.directory) / first.suites[0].directory, "as it was", "me")
    second = night(job, clock=Clock(now=MIDNIGHT + timedelta(days=1)))[1]
    third = night(job, clock=Clock(now=MIDNIGHT + timedelta(days=2)))[1]
    assert third.notes == [f"removed the night {Path(second.directory).name}"]
    left = sorted(path.name for path in (tmp_path / "nights").glob("2026-*"))
    assert left == [Path(first.directory).name, Path(third.directory).name]


def test_nothing_goes_where_the_baselines_cannot_be_read(night, plans, tmp_path):
    plans["a"] = make_plan(suite="a")
    nights(tmp_path / "nights", *DAYS)
    (tmp_path / "nights" / "history.db").write_text("no database")
    _, verdict, _ = night("suites: [a]\nkeep: {nights: 1}\n")
    assert "no older night was removed, because the baselines cannot be read" in verdict.notes[0]
    assert len(list((tmp_path / "nights").glob("2026-03-0*"))) == 6


def test_the_summary_tells_whom_to_ask_and_escapes_what_it_quotes(night, plans, tmp_path):
    case = make_case(FULL)
    pair = make_plan().pairs[0]
    plans["a"] = make_plan(
        replace(pair, owner="@lora <team>"), suite="a", cases=make_plan().cases | {FULL: case}
    )
    _, verdict, text = night("suites: [a]\n", FakeLauncher(slow_lora(1.2)))
    assert "(owner @lora <team>)" in verdict.suites[0].problems[0]
    assert "(owner @lora <team>)" in text
    summary = (Path(verdict.directory) / "summary.md").read_text()
    assert "<team>" not in summary.replace("\\<team\\>", "")
    assert json.loads((Path(verdict.directory) / "night.json").read_text())["schema_version"] == 1
