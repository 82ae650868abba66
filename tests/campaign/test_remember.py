# SPDX-License-Identifier: Apache-2.0
"""What a suite takes from the history and gives to it; and that a store that fails changes no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_suite.campaign import conclude
from lora_suite.campaign import run as campaign
from lora_suite.campaign.run import Request, run_campaign
from lora_suite.history.store import Store
from lora_suite.plan.metric_names import STEP_TIME
from tests.campaign.helpers import FakeLauncher, console, printed
from tests.history.helpers import RATIO
from tests.judge.helpers import LORA, make_plan


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """Run the suite of one pair in an empty folder; returns the campaign and what was printed."""
    monkeypatch.setattr(campaign, "lint_plan", lambda plan: [])
    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: make_plan())
    monkeypatch.chdir(tmp_path)

    def run(history=None):
        screen = console()
        done = run_campaign(Request(suite=Path("suites/smoke.yaml"), history=history), FakeLauncher(), screen)
        stored = json.loads((Path(done.verdict.directory) / "verdict.json").read_text())
        assert stored == done.verdict.model_dump(mode="json")
        return done, printed(screen)

    return run


def test_without_a_store_nothing_is_recorded(suite, tmp_path):
    done, _ = suite()
    assert done.verdict.history == []
    assert not (tmp_path / ".lora-suite").exists()


def test_a_store_that_was_asked_for_is_made_and_shown(suite, tmp_path):
    path = tmp_path / "kept" / "history.db"
    first, _ = suite(path)
    second, _ = suite(path)
    with Store(path) as store:
        assert len(store.sessions()) == 2
    (time,) = [each for each in second.verdict.history if (each.case, each.metric) == (LORA, STEP_TIME)]
    assert len(time.nights) == 2
    assert first.exit_code == second.exit_code == 0


def test_the_reports_are_made_once_and_know_the_history(suite, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(conclude, "store", lambda verdict, folder: made.append(verdict))
    done, _ = suite(tmp_path / "history.db")
    assert made == [done.verdict]
    assert made[0].history


def test_the_usual_store_is_used_where_there_is_one(suite, tmp_path):
    usual = tmp_path / ".lora-suite" / "history.db"
    with Store(usual, create=True):
        suite()
    with Store(usual) as store:
        assert len(store.sessions()) == 1


def test_earlier_nights_tell_the_spread(suite, tmp_path):
    path = tmp_path / "history.db"
    cold, _ = suite(path)
    for _ in range(7):
        suite(path)
    warm, _ = suite(path)
    methods = [
        next(check.effect for check in done.verdict.pairs[0].checks if check.expression.startswith(RATIO))
        for done in (cold, warm)
    ]
    assert "prior" not in methods[0].method
    assert "8 earlier nights of this pair" in methods[1].method


def test_a_store_that_fails_changes_no_verdict_and_is_said(suite, tmp_path):
    broken = tmp_path / "broken.db"
    broken.write_text("no database at all" * 100)
    done, said = suite(broken)
    assert done.exit_code == 0
    assert done.verdict.history == []
    assert "no priors from the history" in said
    assert "not recorded in the history" in said
    assert "broken.db" in said
