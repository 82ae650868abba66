# SPDX-License-Identifier: Apache-2.0
"""The forms of a report by name, and the files they are stored in."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.report import github, junit, markdown, page, terminal


@dataclass(frozen=True)
class Format:
    """One form of a report: the name of its file, and what makes its text."""

    file: str
    render: Callable[[SuiteVerdict], str]


def plain_text(verdict: SuiteVerdict) -> str:
    """The terminal's report as a log file has it: nothing is cut."""
    text = io.StringIO()
    terminal.render(verdict, Console(file=text, force_terminal=False, color_system=None))
    return text.getvalue()


FORMATS = {
    "terminal": Format("report.txt", plain_text),
    "html": Format("report.html", page.render),
    "markdown": Format("report.md", markdown.render),
    "junit": Format("junit.xml", junit.render),
    "github": Format("annotations.txt", github.render),
}

# What every run of a suite leaves beside its verdict.
_STORED = ("html", "markdown", "junit")


def store(verdict: SuiteVerdict, folder: Path) -> None:
    """Write the reports of a suite run into its folder; raises OSError."""
    for name in _STORED:
        form = FORMATS[name]
        (folder / form.file).write_text(form.render(verdict), encoding="utf-8", errors="replace")
