# SPDX-License-Identifier: Apache-2.0
"""`lora-suite report`, and what a run of a suite leaves beside its verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings

from lora_suite.cli import main
from lora_suite.cli.report import report
from lora_suite.report import github, junit, markdown, page
from lora_suite.report.formats import FORMATS, plain_text, store
from tests.report.any_verdict import any_verdict
from tests.report.helpers import suite
from tests.report.nights import night
from tests.report.page.reader import Reader


@pytest.fixture
def results(tmp_path) -> Path:
    """The folder of a suite run that failed."""
    (tmp_path / "verdict.json").write_text(night(pairs=2).model_dump_json(), encoding="utf-8")
    return tmp_path


def invoke(*words: object):
    """Call the command in this process."""
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_the_terminal_is_the_default_and_the_exit_code_is_the_verdicts(results):
    done = invoke(results)
    assert done.exit_code == 3
    assert done.output.splitlines()[0] == "nightly: 16 runs, 2 pairs, 90 min 12 s"
    assert done.output == plain_text(night(pairs=2))


def test_the_verdict_itself_may_be_named(results):
    assert invoke(results / "verdict.json").output == invoke(results).output


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("html", page.render),
        ("markdown", markdown.render),
        ("junit", junit.render),
        ("github", github.render),
        ("terminal", plain_text),
    ],
)
def test_each_format(results, name, render, tmp_path):
    written = tmp_path / "out" / "report"
    written.parent.mkdir()
    done = invoke(results, "--format", name, "-o", written)
    assert (done.exit_code, done.output) == (3, f"{written}\n")
    assert written.read_text(encoding="utf-8") == render(night(pairs=2))
    assert invoke(results, "--format", name).output.rstrip() == render(night(pairs=2)).rstrip()


def test_several_formats_go_into_a_folder(results, tmp_path):
    folder = tmp_path / "new" / "reports"
    done = invoke(results, "--format", "html", "--format", "junit", "--format", "html", "-o", folder)
    assert done.output.splitlines() == [str(folder / "report.html"), str(folder / "junit.xml")]
    assert sorted(path.name for path in folder.iterdir()) == ["junit.xml", "report.html"]


def test_a_folder_that_is_there_gets_the_usual_name(results, tmp_path):
    (tmp_path / "there").mkdir()
    invoke(results, "--format", "markdown", "-o", tmp_path / "there")
    assert (tmp_path / "there" / "report.md").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "html", "--format", "junit"], "several formats at once go into a folder"),
        (["--format", "html", "-o", "no/such/folder/x.html"], "cannot be written"),
        (["--format", "html", "--format", "junit", "-o", "verdict.json"], "cannot be made a folder"),
    ],
)
def test_wrong_usage_is_one_message(results, words, message, monkeypatch):
    monkeypatch.chdir(results)
    done = invoke(results, *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_format_is_refused(results):
    assert invoke(results, "--format", "pdf").exit_code == 2


@pytest.mark.parametrize("content", [None, "", "{", json.dumps({"suite": "x"})])
def test_no_verdict_is_exit_2(tmp_path, content):
    if content is not None:
        (tmp_path / "verdict.json").write_text(content)
    done = invoke(tmp_path)
    assert done.exit_code == 2
    assert "verdict.json" in done.stderr


def test_the_names_of_the_command_are_the_formats():
    (option,) = [each for each in report.params if each.name == "names"]
    assert tuple(option.type.choices) == tuple(FORMATS)


def test_a_run_leaves_a_page_a_comment_and_junit(tmp_path):
    store(suite(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "report.html", "report.md"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page.render(suite())


def test_half_a_character_in_a_log_stops_no_report(tmp_path):
    verdict = suite()
    verdict.runs[0].state = verdict.runs[0].own_state = "ERROR"
    verdict.runs[0].message = "crashed: \ud800\n  \udfff"
    store(verdict, tmp_path)
    assert "crashed: ?" in (tmp_path / "report.md").read_text(encoding="utf-8")


# Shrinking a whole verdict takes minutes: what fails is shown as it was found.
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(any_verdict())
def test_any_verdict_has_every_report(verdict):
    assert Reader(page.render(verdict)).problems == []
    assert all(form.render(verdict) is not None for form in FORMATS.values())
