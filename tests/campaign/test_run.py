# SPDX-License-Identifier: Apache-2.0
"""A suite from plan to exit code, on a launcher that writes files in place of training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from lora_suite.campaign import conclude
from lora_suite.campaign import run as campaign
from lora_suite.campaign.run import Request, run_suite
from lora_suite.config.errors import ConfigError
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.lint import INCOMPARABLE_ARMS, Finding
from lora_suite.plan.model import Difference, Plan
from tests.campaign.helpers import Deed, FakeLauncher, console, printed, slow_lora, train
from tests.judge.helpers import FULL, LORA, RATIO, make_case, make_pair, make_plan, planned


@pytest.fixture(autouse=True)
def lint(monkeypatch):
    """What lint finds in the plan: nothing, unless a test adds something."""
    findings: list[Finding] = []
    monkeypatch.setattr(campaign, "lint_plan", lambda plan: findings)
    return findings


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """Run a plan on a launcher; returns exit code, stored verdict, what was printed, results folder."""

    def run(plan: Plan | None = None, launcher: Any = None, **request: Any):
        monkeypatch.setattr(
            "lora_suite.campaign.request.load_plan", lambda path, **options: plan or make_plan()
        )
        screen = console()
        code = run_suite(
            Request(suite=Path("suites/smoke.yaml"), results=tmp_path / "results", **request),
            launcher or FakeLauncher(),
            screen,
        )
        (folder,) = (tmp_path / "results" / "smoke").iterdir()
        verdict = SuiteVerdict.model_validate_json((folder / "verdict.json").read_text())
        assert verdict.exit_code == code
        return code, verdict, printed(screen), folder

    return run


def ended(**how: Any) -> Deed:
    """A run that ends in this way and leaves nothing."""
    return lambda case, planned, run_dir: Ended(**how)


def short(case, planned, run_dir) -> Ended:
    """A run of 3 steps that ends as if it were done."""
    train(case, planned, run_dir, steps=3)
    return Ended(how="done", status=4)


def loss_stays(case, planned, run_dir) -> Ended:
    """A run that fails its check."""

    def damage(metrics, record):
        metrics["train/loss"]["10"] = 2.5

    train(case, planned, run_dir, damage=damage)
    return Ended(how="done", status=1)


def interrupts(case, planned, run_dir) -> Ended:
    """Ctrl-C while the launcher waits."""
    raise KeyboardInterrupt


CRASH = ended(how="killed", status=137, rank=1, step=5, message="rank 1 was ended by SIGKILL in step 5")


def test_all_is_well(suite):
    launcher = FakeLauncher()
    code, verdict, text, folder = suite(launcher=launcher)
    assert code == 0
    assert len(verdict.runs) == 8
    assert {run.state for run in verdict.runs} == {"PASS"}
    assert [pair.state for pair in verdict.pairs] == ["PASS"]
    assert verdict.pairs[0].checks[0].effect.estimate == pytest.approx(0.7, rel=0.01)
    assert launcher.ran[:3] == [(FULL, 1), (LORA, 1), (FULL, 2)]
    assert (folder / FULL / "4" / "metrics.json").is_file()
    assert text.splitlines()[-1] == "PASS (exit 0): 9 PASS"
    xml = JUnitXml.fromfile(str(folder / "junit.xml"))
    assert (xml.failures, xml.errors) == (0, 0)
    assert xml.tests == sum(1 + len(run.checks) for run in verdict.runs) + 1 + len(verdict.pairs[0].checks)


@pytest.mark.parametrize(
    ("deeds", "code"),
    [
        ({}, 0),
        ({(FULL, 2): loss_stays}, 1),
        (slow_lora(1.0), 1),
        ({(FULL, 2): short}, 4),
        ({(FULL, 2): ended(how="done", status=0)}, 4),
        ({(FULL, 2): CRASH}, 3),
        ({(FULL, 2): ended(how="timeout", status=143)}, 3),
        ({(FULL, 2): ended(how="oom", status=1)}, 3),
        ({(FULL, 2): interrupts}, 130),
        ({(FULL, 2): ended(how="interrupted", status=130)}, 130),
        # The worst wins: broken over incomplete over failed.
        ({(FULL, 1): loss_stays, (FULL, 2): short}, 4),
        ({(FULL, 1): loss_stays, (FULL, 2): short, (LORA, 3): CRASH}, 3),
        ({(FULL, 1): loss_stays, (LORA, 3): CRASH}, 3),
        ({(FULL, 1): CRASH, (FULL, 2): interrupts}, 130),
    ],
)
def test_exit_codes(suite, deeds, code):
    assert suite(launcher=FakeLauncher(deeds))[0] == code


def test_a_limit_inside_the_interval_is_inconclusive(suite):
    code, verdict, _, _ = suite(launcher=FakeLauncher(slow_lora(0.8)))
    assert (code, verdict.pairs[0].state) == (5, "INCONCLUSIVE")


def test_whoever_answers_for_a_failure_stands_beside_it(suite):
    case, pair = replace(make_case(FULL), owner="trainers"), make_pair(owner="lora-team")
    plan = make_plan(pair, cases={FULL: case, LORA: make_case(LORA)})
    launcher = FakeLauncher({**slow_lora(1.2), (FULL, 1): CRASH})
    _, verdict, text, folder = suite(plan, launcher)
    assert verdict.runs[0].owner == "trainers"
    assert verdict.pairs[0].owner == "lora-team"
    assert f"ERROR {FULL} run 1 (owner trainers): killed" in text
    assert "MISSING fsdp2 (owner lora-team): " in text
    assert "(owner lora-team)" in (folder / "report.html").read_text()
    assert "owner trainers" in (folder / "report.md").read_text()


def test_a_failed_check_wins_over_an_inconclusive_pair(suite):
    assert suite(launcher=FakeLauncher({**slow_lora(0.8), (FULL, 2): loss_stays}))[0] == 1


def test_arms_that_differ_stop_nothing_else(suite):
    pair = make_pair(not_comparable=(Difference("sft.seed", 42, 7),))
    launcher = FakeLauncher()
    code, verdict, text, _ = suite(make_plan(pair), launcher)
    assert code == 5
    assert len(launcher.ran) == 8
    assert {run.state for run in verdict.runs} == {"PASS"}
    assert "sft.seed (42 and 7)" in text


def test_a_run_that_breaks_stops_no_other(suite):
    launcher = FakeLauncher({(FULL, 1): CRASH})
    code, verdict, text, _ = suite(launcher=launcher)
    assert code == 3
    assert len(launcher.ran) == 8
    assert sum(run.state == "PASS" for run in verdict.runs) == 7
    assert verdict.pairs[0].state == "MISSING"
    assert "full run 1: ERROR killed: rank 1 was ended by SIGKILL in step 5" in verdict.pairs[0].message
    # What was measured is still shown.
    assert verdict.pairs[0].checks[0].effect.repeats == 3
    assert "rank 1 was ended by SIGKILL in step 5" in text


@pytest.mark.parametrize("deed", [interrupts, ended(how="interrupted", status=130, message="interrupted")])
def test_ctrl_c_keeps_what_was_measured(suite, deed):
    launcher = FakeLauncher({(FULL, 3): deed})
    code, verdict, text, _ = suite(launcher=launcher)
    assert code == 130
    assert verdict.interrupted
    assert launcher.ran[-1] == (FULL, 3)
    assert len(verdict.runs) == 8
    assert [run.state for run in verdict.runs] == ["PASS"] * 4 + ["MISSING"] * 4
    assert verdict.runs[4].message == "interrupted"
    assert {run.message for run in verdict.runs[5:]} == {"did not run"}
    assert verdict.pairs[0].checks[0].effect.repeats == 2
    assert text.splitlines()[-1].startswith("INTERRUPTED (exit 130)")


def test_nothing_planned_is_not_a_pass(suite):
    code, verdict, text, _ = suite(make_plan(pairs=(), runs=()))
    assert (code, verdict.states) == (4, [])
    assert "nothing ran" in text


def test_a_folder_that_is_there_already_is_not_used(suite, tmp_path):
    def squat(case, planned, run_dir):
        """Leave a perfect run where the next one is to go."""
        train(case, planned, run_dir)
        return train(case, planned, run_dir.parent / str(planned.repeat + 1))

    launcher = FakeLauncher({(FULL, 1): squat})
    code, verdict, _, _ = suite(launcher=launcher)
    assert code == 3
    taken = next(run for run in verdict.runs if (run.case, run.repeat) == (FULL, 2))
    assert taken.state == "ERROR"
    assert "File exists" in taken.message
    assert (FULL, 2) not in launcher.ran


def test_a_copied_run_is_not_a_second_measurement(suite):
    def copy(case, planned, run_dir):
        def damage(metrics, record):
            record["run_id"] = f"{FULL}-1-0123abcd"

        return train(case, planned, run_dir, damage=damage)

    code, verdict, _, _ = suite(launcher=FakeLauncher({(FULL, 2): copy}))
    assert code == 4
    assert verdict.runs[2].message == f"its run.json is that of {FULL} run 1"


def test_a_launcher_that_cannot_start_breaks_its_run_only(suite):
    def refuse(case, planned, run_dir):
        raise PermissionError(13, "Permission denied", "bash")

    code, verdict, _, _ = suite(launcher=FakeLauncher({(LORA, 1): refuse}))
    assert code == 3
    assert verdict.runs[1].message == "crashed: bash: Permission denied"


def test_keep_reaches_the_launcher(suite):
    launcher = FakeLauncher()
    suite(launcher=launcher, keep=True)
    assert set(launcher.kept) == {True}


def test_two_runs_of_a_suite_have_two_folders(monkeypatch, tmp_path):
    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: make_plan())
    for _ in range(2):
        run_suite(Request(Path("smoke.yaml"), results=tmp_path), FakeLauncher(), console())
    assert len(list((tmp_path / "smoke").iterdir())) == 2


def test_with_an_error_of_lint_nothing_runs(suite, lint, tmp_path):
    lint += [
        Finding(Path("scripts/a.sh"), 6, "error", "unknown-metric", "no such metric"),
        Finding(Path("scripts/a.sh"), 7, "warning", "waiver-expired", "expired"),
    ]
    launcher = FakeLauncher()
    with pytest.raises(ConfigError) as caught:
        suite(launcher=launcher)
    assert str(caught.value).splitlines() == [
        "nothing runs, because of",
        "scripts/a.sh:6: error: no such metric [unknown-metric]",
    ]
    assert launcher.ran == []
    assert not (tmp_path / "results").exists()


def test_a_warning_of_lint_is_printed_first(suite, lint):
    lint.append(Finding(Path("scripts/a.sh"), 7, "warning", "waiver-expired", "expired"))
    code, _, text, _ = suite()
    assert code == 0
    assert text.splitlines()[0] == "scripts/a.sh:7: warning: expired [waiver-expired]"


def test_arms_that_cannot_be_compared_are_no_error_of_lint(suite, lint):
    lint.append(Finding(Path("suites/a.yaml"), 0, "error", INCOMPARABLE_ARMS, "differ"))
    assert suite()[0] == 0


def test_a_results_folder_that_cannot_be_made_is_a_configuration_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: make_plan())
    with pytest.raises(ConfigError, match=r"file.*--results"):
        run_suite(Request(Path("smoke.yaml"), results=tmp_path / "file"), FakeLauncher(), console())


def test_a_full_disk_at_the_end_is_one_line(monkeypatch, tmp_path):
    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: make_plan())
    monkeypatch.setattr(conclude, "write_json_atomically", full)
    screen = console()
    assert run_suite(Request(Path("smoke.yaml"), results=tmp_path), FakeLauncher(), screen) == 3
    last = printed(screen).splitlines()[-1]
    assert "verdict.json: No space left on device; the verdict above is not stored" in last


def test_a_single_case_needs_no_pair(suite):
    plan = make_plan(pairs=(), runs=(planned(FULL),), cases={FULL: make_case(FULL)})
    code, verdict, _, _ = suite(plan)
    assert (code, verdict.states) == (0, ["PASS"])


def test_the_stored_verdict_is_json_without_nan(suite):
    *_, folder = suite(launcher=FakeLauncher({(FULL, 2): short}))
    json.loads((folder / "verdict.json").read_text(), parse_constant=pytest.fail)


def test_the_request_reaches_the_plan(monkeypatch, tmp_path):
    seen = {}

    def load(path, **options):
        seen.update(options, path=path)
        return make_plan()

    monkeypatch.setattr("lora_suite.campaign.request.load_plan", load)
    request = Request(
        Path("a.yaml"),
        overrides=("~x.y",),
        arm_overrides=("lora:a=1",),
        select="fsdp2",
        tiers="nightly",
        repeats=2,
        budget_minutes=20.0,
        results=tmp_path,
    )
    run_suite(request, FakeLauncher(), console())
    assert seen == {
        "path": Path("a.yaml"),
        "overrides": ("~x.y",),
        "arm_overrides": ("lora:a=1",),
        "select": "fsdp2",
        "tiers": "nightly",
        "repeats": 2,
        "budget_minutes": 20.0,
        "moved": None,
    }


def test_one_line_a_finished_run_where_there_is_no_terminal(suite):
    _, _, text, _ = suite()
    lines = text.splitlines()[:8]
    assert [line.split(" ")[:3] for line in lines[:2]] == [["1/8", "PASS", FULL], ["2/8", "PASS", LORA]]
    assert "10/10 steps" in lines[0]
    assert RATIO not in text.splitlines()[0]
