# SPDX-License-Identifier: Apache-2.0
"""What a run of a suite leaves for its readers: reports, the command, the environment, where limits stand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_suite.campaign import run as campaign
from lora_suite.campaign.run import Request, run_campaign
from lora_suite.cli import main
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.report import markdown, page
from tests.campaign.helpers import FakeLauncher, console, slow_lora
from tests.judge.helpers import RATIO, make_plan

SUITE = f"""name: s
pairs:
  - name: full_lora
    arms: {{full: a, lora: b}}
    checks:
      - {RATIO}
"""


@pytest.fixture
def campaign_of(monkeypatch, tmp_path):
    """Run a plan in which LoRA takes as long as full SFT; returns the campaign and its folder."""
    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: make_plan())
    monkeypatch.setattr(campaign, "lint_plan", lambda plan: [])

    def run(**request):
        file = tmp_path / "suite.yaml"
        plan = make_plan()
        file.write_text(SUITE.replace("full_lora", plan.pairs[0].name), encoding="utf-8")
        done = run_campaign(
            Request(suite=file, results=tmp_path / "results", **request),
            FakeLauncher(slow_lora(1.0)),
            console(),
        )
        return done, Path(done.verdict.directory)

    return run


def test_the_reports_are_those_of_the_stored_verdict(campaign_of):
    _, folder = campaign_of()
    stored = SuiteVerdict.model_validate_json((folder / "verdict.json").read_text(encoding="utf-8"))
    assert (folder / "report.html").read_text(encoding="utf-8") == page.render(stored)
    assert (folder / "report.md").read_text(encoding="utf-8") == markdown.render(stored)
    assert (folder / "junit.xml").is_file()


def test_the_verdict_names_its_command_and_its_environment(campaign_of, tmp_path):
    verdict = campaign_of(overrides=("policy.init=random",))[0].verdict
    assert shlex.split(verdict.command) == [
        "lora-suite",
        "run",
        str(tmp_path / "suite.yaml"),
        "policy.init=random",
    ]
    assert set(verdict.environments) == {run.environment for run in verdict.runs} - {""}


def test_a_failed_pair_is_annotated_at_the_line_of_its_limit(campaign_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    campaign_of()
    assert "::error file=suite.yaml,line=6,title=FAIL " in capsys.readouterr().out


def test_nobody_else_gets_annotations(campaign_of, monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    campaign_of()
    assert "::error" not in capsys.readouterr().out


def test_the_command_asks_for_the_same_again(monkeypatch):
    request = Request(
        suite=Path("suites/my suite.yaml"),
        overrides=("~policy.tokenizer.chat_template", "a='b c'"),
        arm_overrides=("lora:x=1", "full:y=2"),
        select="fsdp2 and not lora",
        repeats=6,
        budget_minutes=1.5,
    )
    asked = []
    monkeypatch.setattr(campaign, "run_suite", lambda again: asked.append(again) or 0)
    program, *words = shlex.split(request.command)
    assert program == "lora-suite"
    assert CliRunner().invoke(main, words).exit_code == 0
    (again,) = asked
    for name in ("suite", "overrides", "arm_overrides", "select", "repeats", "budget_minutes"):
        assert getattr(again, name) == getattr(request, name)
