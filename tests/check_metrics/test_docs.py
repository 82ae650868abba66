# SPDX-License-Identifier: Apache-2.0
"""The page docs/check_metrics.md says what the checker does."""

import re
from pathlib import Path

import pytest

from check_metrics import ExpressionError, parse, render
from check_metrics.cli import main
from check_metrics.language import CALLABLE
from tests.check_metrics.helpers import Steps, judge

PAGE = (Path(__file__).parents[2] / "docs" / "check_metrics.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    table = PAGE.split(heading)[1].split("\n\n| ")[1].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]


def examples() -> list[str]:
    """Every check in the last column of the tables of the language and of its functions."""
    cells = [row[-1] for heading in ("## Language", "### Functions") for row in rows(heading)]
    return [text for cell in cells for text in re.findall("`([^`]+)`", cell) if "[" in text or '("' in text]


@pytest.mark.parametrize("text", examples())
def test_examples_are_checks(text: str) -> None:
    assert parse(text).text == text


def test_every_function_has_a_row_with_an_example() -> None:
    documented = {name for row in rows("### Functions") for name in re.findall(r"`(\w+)\(", row[0])}
    assert documented == set(CALLABLE)
    assert documented == {name for text in examples() for name in re.findall(r"(\w+)\(", text)}


@pytest.mark.parametrize("text", ["True", "1 < 2", 'data["x"]["1"]'])
def test_what_the_page_calls_refused_is(text: str) -> None:
    assert f"`{text}`" in PAGE
    with pytest.raises(ExpressionError):
        parse(text)


def test_windows_of_the_table() -> None:
    fifty: dict[str, Steps] = {"x": {step: float(step) for step in range(1, 51)}}
    means = {"1 to 50": 25.5, "2 to 50": 26.0, "45 to 49": 47.0, "10 to 20": 15.0}
    for window, steps in rows("## Windows"):
        call = window.strip("`").replace("(x", '(data["x"]')
        assert judge(f"{call} > 0", fifty).value == means[steps.split(":")[0]]


def test_the_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    data: dict[str, Steps] = {
        "train/loss": {50: 0.71},
        "ray/node.0.gpu.0.mem_gb": {0: 5.0, 10: 52.07},
        "ray/node.0.gpu.1.mem_gb": {0: 5.0, 10: 59.5},
        "timing/train/total_step_time": [95.0] + [22.51] * 49,
    }
    checks = re.findall(r"'(.*)'", PAGE.split("```bash")[1].split("```")[0])
    shown = PAGE.split("```text\n")[1].split("```")[0]
    assert render.table_text([judge(check, data) for check in checks]).split() == shown.split()


def test_options_of_the_page_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    offered = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert offered <= set(re.findall(r"--[a-z-]+", PAGE))
