# SPDX-License-Identifier: Apache-2.0
"""The table at several widths: nothing is cut, and it can be read."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from check_metrics import CheckResult, render
from check_metrics.text import number_text, percent_text, printable, shortened
from tests.check_metrics.helpers import judge, write_metrics

ROOT = Path(__file__).parents[2]
LONG = 'mean(data["timing/train/policy_training/submit_training_futures_of_every_worker"], 2) < 12345.678901'
VALUE = 12.345678901234567


@pytest.fixture
def results() -> list[CheckResult]:
    """A long check, a failure, a narrow pass, two comparisons, a predicate."""
    name = "timing/train/policy_training/submit_training_futures_of_every_worker"
    data = {name: [VALUE, VALUE], "x": [1.0, 1.98]}
    checks = (
        LONG,
        'max(data["x"]) < 1',
        'max(data["x"]) < 2',
        '0 < max(data["x"]) < 9',
        'all_finite(data["x"])',
    )
    return [judge(check, data) for check in checks]


def squeezed(text: str) -> str:
    """The text without layout."""
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("columns", [80, 160])
def test_fixed_widths(results: list[CheckResult], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = render.table_text(results)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert f"{VALUE} < 12345.678901" in text
    assert "! 1.0 %" in text
    assert "misses its limit by 98.0 %" in text
    assert squeezed("worker") in squeezed(text)
    for result in results:
        assert result.status in text


def test_narrow_table_puts_the_value_under_the_check(
    results: list[CheckResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = render.table_text(results[:1]).splitlines()
    assert lines[4].startswith(' PASS     mean(data["timing/train/policy_training/')
    assert lines[4].endswith(" 99.9 %")
    assert lines[-2].strip() == ""
    assert lines[-3].strip() == f"{VALUE} < 12345.678901"


def test_without_a_terminal_each_check_has_one_line(
    results: list[CheckResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = render.table_text(results[:1]).splitlines()[4]
    assert long.startswith(f" PASS     {LONG}   {VALUE} < 12345.678901   99.9 %")


def test_summary(results: list[CheckResult]) -> None:
    assert render.table_text(results).splitlines()[-1] == "4 of 5 checks pass; ! 1 with a margin under 5 %"


def test_overall_needs_results(results: list[CheckResult]) -> None:
    assert render.overall([]) == "FAIL"
    assert render.overall(results) == "FAIL"
    assert render.overall(results[:1]) == "PASS"


def on_terminal(columns: int, *arguments: str | Path) -> str:
    """What the command shows on a terminal of this width."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-m", "check_metrics", *arguments], stdout=follower, env=environment, check=False
    )
    os.close(follower)
    assert done.returncode == 1
    with os.fdopen(leader, "rb", buffering=0) as screen:
        return screen.read(65536).decode()


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "m.json", {"x": {1: 1.0}})
    screen = on_terminal(100, metrics, 'max(data["x"]) < 2', 'max(data["x"]) < 1')
    assert "\x1b[32mPASS" in screen
    assert "\x1b[31mFAIL" in screen


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (-3.0, "-3"), (0.1, "0.1"), (1e22, "1e+22"), (VALUE, "12.345678901234567"), (1e-7, "1e-07")],
)
def test_numbers_are_never_cut(value: float, text: str) -> None:
    assert number_text(value) == text
    assert float(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(25.0, "25.0 %"), (-4.14, "-4.1 %"), (0.04, "0.04 %"), (-0.0012, "-0.0012 %"), (0.0, "0.0 %")],
)
def test_percent(value: float, text: str) -> None:
    assert percent_text(value) == text


def test_printable() -> None:
    assert printable("a\x1b\n\ud800é ") == "a\\x1b\\n\\ud800é "
    assert printable("plain") == "plain"
    assert shortened("abcdef", 3) == "abc…"
