# SPDX-License-Identifier: Apache-2.0
"""The commands of the history: what they print, and their exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lora_suite.cli import main
from lora_suite.history.store import Store
from tests.history.folders import suite_run
from tests.history.helpers import CASE, fill, noisy, run, session, started
from tests.judge.helpers import FULL, LORA

STEP = [*noisy(30), *noisy(10, seed=2, level=0.105)]


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Call a command on the store of this test; returns exit code and output."""
    monkeypatch.setenv("LORA_SUITE_HISTORY", str(tmp_path / "history.db"))
    monkeypatch.chdir(tmp_path)

    def call(*words):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    return call


@pytest.fixture
def filled(tmp_path):
    """Fill the store of this test with nights."""

    def make(values):
        with Store(tmp_path / "history.db", create=True) as store:
            fill(store, values)

    return make


def test_results_go_in_and_out(cli, tmp_path):
    (tmp_path / "results").mkdir()
    folder = suite_run(tmp_path / "results")
    code, said = cli("history", "import", "results")
    assert (code, "1 new, 0 known already, 0 damaged" in said) == (0, True)
    code, said = cli("history", "list")
    assert code == 0
    assert folder.name in said
    assert "1 suite runs; no alert was answered yet" in said
    code, shown = cli("history", "show", said.split()[0][:5])
    assert code == 0
    assert f"PASS {LORA} run 4" in shown
    code, said = cli("history", "export")
    assert code == 0
    assert json.loads(said)["name"] == folder.name
    code, said = cli("history", "prune", "--keep-days", "0")
    assert code == 0
    assert "dropped" in said


def test_an_import_with_damage_is_incomplete(cli, tmp_path):
    (tmp_path / "hurt").mkdir()
    (tmp_path / "hurt" / "verdict.json").write_text("[]")
    code, said = cli("history", "import", "hurt")
    assert code == 4
    assert "not imported" in said
    assert cli("history", "import", tmp_path / "absent")[0] == 2


def test_commands_without_a_store_say_where_it_would_be(cli, tmp_path):
    for words in (["history", "list"], ["trend", CASE], ["ack", CASE, "--label", "noise"]):
        code, said = cli(*words)
        assert code == 2
        assert "history.db: no history here" in said
    assert not (tmp_path / "history.db").exists()


def test_a_trend_that_is_worse_names_run_and_commits_and_fails(cli, filled):
    filled(STEP)
    code, said = cli("trend", CASE)
    assert code == 1
    assert f"first bad: {started(30)} run run-30; last good: {started(29)} run run-29" in said
    assert "commits c0029..c0030" in said
    assert "▲" in said


def test_a_trend_can_be_read_by_programs(cli, filled):
    filled(STEP)
    code, said = cli("trend", CASE, "--json", "--last", "12")
    document = json.loads(said)
    assert code == 1
    assert (document["state"], document["nights_judged"], len(document["nights"])) == ("FAIL", 40, 12)
    assert document["tonight"]["first_bad"]["code"] == "c0030"


def test_quiet_and_short_trends_have_their_codes(cli, filled):
    filled(noisy(9))
    assert cli("trend", CASE)[0] == 5
    filled(noisy(20))
    assert cli("trend", CASE)[0] == 0
    assert cli("trend", "nobody")[0] == 2


def test_an_acknowledged_alert_is_quiet_until_its_day(cli, filled):
    filled(STEP)
    code, said = cli("ack", CASE, "--label", "real")
    assert code == 2
    assert "--until" in said
    code, said = cli("ack", CASE, "--label", "real", "--until", "2000-01-01", "--note", "too late")
    assert code == 0
    assert "of 1 alerts answered so far, 0 were noise (0 %)" in said
    code, said = cli("trend", CASE)
    assert code == 1
    assert "no longer acknowledged, since 2000-01-01 is over" in said
    assert cli("ack", CASE, "--label", "expected", "--note", "new kernel")[0] == 0
    code, said = cli("trend", CASE)
    assert code == 0
    assert "acknowledged as expected" in said


def test_what_is_not_compared_is_said(cli, filled, tmp_path):
    filled(noisy(12))
    with Store(tmp_path / "history.db") as store:
        store.add(session(12, [run(12, 0.2, environment="", version="recipe-b")]))
    code, said = cli("trend", CASE)
    assert code == 5
    assert "not compared: 12 nights in another environment or with another recipe (12 of them" in said
    assert "the environment was not recorded" in said


def test_baselines_are_set_and_held_against(cli, tmp_path):
    (tmp_path / "results").mkdir()
    first, second = suite_run(tmp_path / "results"), suite_run(tmp_path / "results")
    code, said = cli("baseline", "set", "release", first, "--why", "as released")
    assert code == 0
    assert "release: 8 runs of smoke" in said
    code, said = cli("baseline", "diff", "release", second)
    assert code == 5
    assert f"INCONCLUSIVE {FULL}: timing/train/step_time +0.00 %" in said
    assert cli("baseline", "diff", "nothing", second)[0] == 2
