# SPDX-License-Identifier: Apache-2.0
"""Proposals from recorded runs: what is proposed, and each reason to refuse."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_suite.campaign import run as campaign
from lora_suite.campaign.calibrate import Proposal, calibrate
from lora_suite.campaign.run import Request, run_campaign
from lora_suite.cli import main
from lora_suite.judge.suite import Execution, judge_suite, run_directory
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.driver import read_driver
from lora_suite.plan.model import Case, DeclaredCheck, Plan, UnreadableCase
from tests.campaign.helpers import FakeLauncher, console
from tests.campaign.helpers import train as train_healthy
from tests.judge.helpers import DONE, FULL, LORA, ROOT, Damage, make_case, planned, write_run

DRIVER = """#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=10 minutes=3
train "$@"
check 'data["train/loss"]["10"] < 2.0' 'median(data["timing/train/step_time"], 4) < 30'
check --on H100 'max(data["memory/peak_allocated_gib"]) < 3'
"""
# Half a percent around 0.2 s.
TIMES = (0.2, 0.201, 0.199, 0.2, 0.2)
SCATTERED = (0.2, 0.26, 0.16, 0.22, 0.2)


class Project:
    """One case with a driver of its own, and recorded runs of it."""

    def __init__(self, root: Path, stem: str = FULL, driver: str = DRIVER) -> None:
        self.root = root
        self.driver = root / "scripts" / f"{stem}.sh"
        self.driver.parent.mkdir()
        shutil.copy(ROOT / "scripts" / "common.sh", self.driver.parent)
        (root / "recipes").mkdir()
        (root / "recipes" / f"{stem}.yaml").touch()
        self.driver.write_text(driver)
        checks = read_driver(self.driver).declared_checks(self.driver, date(2026, 1, 1))
        self.case = replace(make_case(stem, checks), driver_path=self.driver)

    def plan(self, repeats: int) -> Plan:
        """The case alone, several times."""
        runs = tuple(planned(self.case.stem, repeat) for repeat in range(1, repeats + 1))
        return Plan("test", self.root / "suites/test.yaml", {self.case.stem: self.case}, (), runs, None)

    def calibrate(
        self,
        times: tuple[float, ...] = TIMES,
        damage: Damage | None = None,
        device: str | None = "NVIDIA H200",
        ended: Ended = DONE,
    ) -> Proposal:
        """Record runs with these step times and calibrate; `damage` is done to the second."""

        def on_device(metrics, record) -> None:
            record["environment"]["strict"]["device"] = device

        plan = self.plan(len(times))
        executions = {}
        for run, time in zip(plan.runs, times, strict=True):

            def both(metrics, record, repeat=run.repeat) -> None:
                on_device(metrics, record)
                if damage is not None and repeat == 2:
                    damage(metrics, record)

            folder = run_directory(self.root / "results", run)
            write_run(folder, self.case, run.repeat, step_time=time, damage=both)
            executions[run] = Execution(ended, datetime(2026, 1, 1, tzinfo=UTC), 1.0)
        runs, pairs = judge_suite(plan, self.root / "results", executions)
        verdict = SuiteVerdict(suite="test", started="", seconds=1.0, directory="", runs=runs, pairs=pairs)
        return calibrate(plan, verdict)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_limits_of_this_gpu(project):
    proposal = project.calibrate()
    assert (proposal.refusals, proposal.exit_code) == ((), 0)
    (patch,) = proposal.patches
    added = [line[1:] for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    # Medians 0.2 s and 0.5 GiB, 5 % each.
    assert added == [
        'check \'data["train/loss"]["10"] < 2.0\'',
        "check --on H200 'median(data[\"timing/train/step_time\"], 4) < 0.21'",
        "check --on H100 'max(data[\"memory/peak_allocated_gib\"]) < 3' \\",
        "  --on H200 'max(data[\"memory/peak_allocated_gib\"]) < 0.525'",
    ]
    assert (
        proposal.lines[0]
        == f"{FULL}: whether a GPU was throttled is not known: run.json has no health of GPUs"
    )
    assert proposal.lines[1] == (
        f'{FULL}: median(data["timing/train/step_time"], 4) < 0.21 (median 0.2 of 5 runs, spread 0 %, '
        "margin 5.0 %, smallest effect 1.5 %)"
    )


def test_the_patched_driver_passes_here_and_is_inconclusive_elsewhere(project):
    (patch,) = project.calibrate().patches
    subprocess.run(["git", "apply"], input=patch, text=True, cwd=project.root, check=True)
    again = Project.__new__(Project)
    again.root, again.driver = project.root, project.driver
    checks = read_driver(project.driver).declared_checks(project.driver, date(2026, 1, 1))
    again.case = replace(project.case, checks=checks)
    shutil.rmtree(project.root / "results")
    plan = again.plan(2)
    states = {}
    for run, device in zip(plan.runs, ("NVIDIA H200", "NVIDIA B200"), strict=True):
        folder = run_directory(project.root / "results", run)
        write_run(
            folder,
            again.case,
            run.repeat,
            step_time=0.2,
            damage=lambda metrics, record, device=device: record["environment"]["strict"].update(
                device=device
            ),
        )
        (verdict,), _ = judge_suite(
            replace(plan, runs=(run,)),
            project.root / "results",
            {run: Execution(DONE, datetime(2026, 1, 1, tzinfo=UTC), 1.0)},
        )
        states[device] = [(check.state, check.message) for check in verdict.checks]
    assert [state for state, _ in states["NVIDIA H200"]] == ["PASS"] * 3
    assert states["NVIDIA B200"] == [
        ("PASS", states["NVIDIA B200"][0][1]),
        ("INCONCLUSIVE", "no limit is known for NVIDIA B200, only for H200"),
        ("INCONCLUSIVE", "no limit is known for NVIDIA B200, only for H100, H200"),
    ]


def test_a_limit_that_is_missed_today_is_replaced(tmp_path):
    project = Project(tmp_path, driver=DRIVER.replace("< 30", "< 0.1"))
    proposal = project.calibrate(ended=Ended(how="done", status=1))
    assert "+check --on H200 'median(data[\"timing/train/step_time\"], 4) < 0.21'" in proposal.patches[0]


def test_a_driver_without_such_limits_gets_them(tmp_path):
    head = DRIVER.partition("check ")[0]
    (patch,) = (
        Project(tmp_path, driver=f'{head}check \'data["train/loss"]["10"] < 2.0\'\n').calibrate().patches
    )
    assert patch.splitlines()[-2:] == [
        "+check --on H200 'median(data[\"timing/train/step_time\"], 4) < 0.21'",
        "+check --on H200 'max(data[\"memory/peak_allocated_gib\"]) < 0.525'",
    ]


def test_a_limit_under_a_waiver_stays(tmp_path):
    waiver = (
        "waive reason=slow issue=https://example.org/1 owner=me until=2999-01-01 "
        "revert_to='median(data[\"timing/train/step_time\"], 4) < 1'\n"
    )
    head, _, memory = DRIVER.partition("check ")
    time = "check 'median(data[\"timing/train/step_time\"], 4) < 30'\n"
    proposal = Project(
        tmp_path, driver=f"{head}{waiver}{time}{memory[memory.index('check --on') :]}"
    ).calibrate()
    assert proposal.lines[1].endswith("has a waiver, and stays")
    assert "step_time" not in "".join(line for line in proposal.patches[0].splitlines() if line[0] in "+-")


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40S", "L40S"),
        ("AMD EPYC 7763 64-Core Processor", "'AMD EPYC 7763 64-Core Processor'"),
    ],
)
def test_the_key_is_the_gpu_s_model(project, device, key):
    assert f"check --on {key} 'median(" in project.calibrate(device=device).patches[0]


def nonfinite(metrics, record) -> None:
    metrics["train/grad_norm"]["5"] = None


def throttled(reasons: int) -> Damage:
    """A GPU that gave these reasons after the run."""

    def damage(metrics, record) -> None:
        record["health"] = {"before": {"gpus": []}, "after": {"gpus": [{"throttle_reasons": reasons}]}}

    return damage


def slows_down(metrics, record) -> None:
    for step in ("8", "9", "10"):
        metrics["timing/train/step_time"][step] = 0.24


def falls_short(metrics, record) -> None:
    for series in metrics.values():
        series.pop("10", None)
    record["steps_done"] = 9


def elsewhere(metrics, record) -> None:
    record["environment"]["strict"]["device"] = "NVIDIA H100"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"damage": nonfinite}, 1, "run 2: train/grad_norm: FAIL not finite at step 5"),
        ({"damage": throttled(0x20)}, 5, "run 2: a GPU was throttled"),
        ({"damage": throttled(0x40)}, 5, "run 2: a GPU was throttled"),
        ({"damage": throttled(0x80)}, 5, "run 2: a GPU was throttled"),
        ({"damage": throttled(0x08)}, 5, "run 2: a GPU was throttled"),
        ({"damage": slows_down}, 5, "run 2: not steady: its last third's step time is +19 %"),
        ({"damage": falls_short}, 4, "run 2: MISSING reached 9 of 10 steps"),
        ({"damage": elsewhere}, 5, "on different devices: NVIDIA H100, NVIDIA H200"),
        ({"device": None}, 5, "run.json does not name the device"),
        ({"times": SCATTERED}, 5, 'median(data["timing/train/step_time"], 4) < 30: 5 runs from 0.16 to 0.26'),
        ({"times": TIMES[:2]}, 5, "2 runs are too few"),
        ({"ended": Ended(how="oom", status=1)}, 3, "run 1: ERROR out of memory"),
    ],
)
def test_refusals(project, options, code, message):
    proposal = project.calibrate(**options)
    assert any(message in refusal for refusal in proposal.refusals), proposal.refusals
    assert (proposal.exit_code, proposal.patches, proposal.lines) == (code, (), ())


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100])
def test_what_is_no_throttling(project, reasons):
    """Idle, clocks that were set, the power cap of a busy GPU, boost groups."""
    assert project.calibrate(damage=throttled(reasons)).exit_code == 0


def test_another_trainer_s_case_is_left_alone(project):
    plan = project.plan(3)
    other = UnreadableCase(
        stem="theirs",
        tree={},
        overrides=(),
        steps=1,
        minutes=1.0,
        checks=(),
        problem="",
        source=Path("s.yaml"),
    )
    verdict = SuiteVerdict(suite="test", started="", seconds=1.0, directory="", runs=[], pairs=[])
    proposal = calibrate(replace(plan, cases={"theirs": other}), verdict)
    assert proposal == Proposal(("theirs: limits of another trainer's script are not proposed",), (), (), 0)


def test_an_invariant_that_fails_is_a_refusal(tmp_path):
    def dead(metrics, record) -> None:
        record["invariants"][2]["ok"] = False

    proposal = Project(tmp_path, stem=LORA).calibrate(damage=dead)
    assert "run 2: b_gradients_step1: FAIL" in proposal.refusals[0]
    assert proposal.exit_code == 1


class TestCommand:
    """`lora-suite calibrate`, on a launcher that writes files."""

    @pytest.fixture
    def invoke(self, tmp_path, monkeypatch):
        project = Project(tmp_path)
        monkeypatch.setattr(
            "lora_suite.campaign.request.load_plan", lambda path, *, repeats, **options: project.plan(repeats)
        )
        monkeypatch.setattr(campaign, "lint_plan", lambda plan: [])

        def run(*words: str, damage: Damage | None = None):
            def deed(case: Case, run, run_dir):
                def on_device(metrics, record) -> None:
                    record["environment"]["strict"]["device"] = "NVIDIA H200"
                    if damage is not None:
                        damage(metrics, record)

                return train_healthy(case, run, run_dir, step_time=0.2, damage=on_device)

            deeds = {(FULL, repeat): deed for repeat in range(1, 9)}
            monkeypatch.setattr(campaign, "LocalLauncher", lambda checkouts: FakeLauncher(deeds))
            results = ["--results", str(tmp_path / "results")]
            return CliRunner().invoke(main, ["calibrate", "suites/smoke.yaml", *results, *words])

        return run

    def test_the_patch_is_printed(self, invoke):
        result = invoke("--repeats", "3")
        assert result.exit_code == 0
        assert "\n+check --on H200 'median(data[\"timing/train/step_time\"], 4) < 0.21'\n" in result.output

    def test_the_patch_is_written(self, invoke, tmp_path):
        result = invoke("--repeats", "3", "--output", str(tmp_path / "limits.diff"))
        assert result.exit_code == 0
        assert "\n+check" not in result.output
        assert "+check --on H200" in (tmp_path / "limits.diff").read_text()

    def test_a_refusal_writes_nothing(self, invoke, tmp_path):
        output = tmp_path / "limits.diff"
        result = invoke("--repeats", "3", "--output", str(output), damage=slows_down)
        assert result.exit_code == 5
        assert result.stderr.startswith(f"refused: {FULL} run 1: not steady")
        assert not output.exists()

    @pytest.mark.parametrize("words", [[], ["--repeats", "2"]])
    def test_fewer_than_three_runs_are_refused_at_once(self, invoke, words):
        assert invoke(*words).exit_code == 2


def test_a_campaign_tells_what_it_ran(tmp_path, monkeypatch):
    project = Project(tmp_path)
    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: project.plan(2))
    monkeypatch.setattr(campaign, "lint_plan", lambda plan: [])
    request = Request(suite=Path("suites/test.yaml"), results=tmp_path / "results")
    done = run_campaign(request, FakeLauncher(), console())
    assert [run.state for run in done.verdict.runs] == ["INCONCLUSIVE"] * 2
    assert done.exit_code == done.verdict.exit_code == 5
    assert list(done.plan.cases) == [FULL]


def test_a_driver_that_other_cases_share_gets_no_limits_of_one_of_them(project):
    project.case = replace(project.case, driver_path=project.driver.with_name(f"{LORA}.sh"))
    said = f"{FULL}: runs the driver of {LORA}; its limits stand in the suite"
    assert project.calibrate() == Proposal((said,), (), (), 0)


def test_what_the_suite_limits_stays(project):
    limit = 'median(data["timing/train/step_time"], 4) <= 0.3'
    suites = DeclaredCheck(limit, line=0, on="H200", call=1, file=project.root / "suites/test.yaml")
    project.case = replace(project.case, checks=(*project.case.checks, suites))
    proposal = project.calibrate()
    assert f"{FULL}: {limit}: stands in the suite, and stays" in proposal.lines
    assert limit not in "".join(proposal.patches)
