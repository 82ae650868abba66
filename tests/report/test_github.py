# SPDX-License-Identifier: Apache-2.0
"""Annotations: one a problem, at the line of its limit, in GitHub's own escapes."""

from __future__ import annotations

import pytest

from lora_suite.report.github import MOST, annotate, render
from tests.report.helpers import CASES, check, run, suite
from tests.report.nights import night


def failing(source: str, **changes):
    """A suite with one failed check that says where its limit stands."""
    return suite(runs=[run(checks=[check("FAIL", message="misses its limit", source=source, **changes)])])


def test_a_failed_check_is_an_error_at_its_line(tmp_path):
    (line,) = render(failing(f"{tmp_path}/scripts/a.sh:12"), tmp_path).splitlines()
    assert line.startswith("::error file=scripts/a.sh,line=12,title=FAIL sft-tiny-llama-1n2c-fsdp2 run 1%3A ")
    assert line.endswith("::1.5, misses its limit")


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("scripts/a.sh:12", "file=scripts/a.sh,line=12,"),
        ("/elsewhere/a,b.sh:3", "file=/elsewhere/a%2Cb.sh,line=3,"),
        ("scripts/a.sh", ""),
        ("", ""),
    ],
)
def test_places(source, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert render(failing(source), tmp_path).startswith(f"::error {place}title=FAIL")


def test_paths_are_relative_to_the_workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "file=scripts/a.sh," in render(failing(f"{tmp_path}/scripts/a.sh:1"))


def test_repeats_are_one_annotation_and_lines_are_escaped():
    lines = render(night(pairs=3)).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("::error ") for line in lines)
    assert "%0A  Traceback" in lines[2]
    assert "0.2202 → 0.5871" in lines[1]
    assert "+22.7 %25 [+22.1, +23.3]" in lines[0]


def test_a_message_cannot_give_a_command_of_its_own():
    verdict = suite(
        runs=[run(state="ERROR", own_state="ERROR", message="x\r\n::set-output name=a::b 100%", checks=[])],
    )
    (line,) = render(verdict).splitlines()
    assert line.endswith("::x%0D%0A::set-output name=a::b 100%25")


def test_a_suite_that_passed_says_nothing():
    assert render(suite()) == ""


def test_what_github_would_not_show_is_counted():
    runs = [
        run(f"c{number}", state="ERROR", own_state="ERROR", message="m", checks=[]) for number in range(25)
    ]
    lines = render(suite(runs=runs, pairs=[])).splitlines()
    assert len(lines) == MOST
    assert lines[-1] == "::error title=lora-suite::16 more problems, see report.html"


def test_only_a_job_of_github_gets_them(monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    annotate(failing("a.sh:1"))
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    annotate(failing("a.sh:1"))
    assert capsys.readouterr().out.startswith("::error file=a.sh,line=1,")
    assert CASES[0] in render(failing("a.sh:1"))
