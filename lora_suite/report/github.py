# SPDX-License-Identifier: Apache-2.0
"""Annotations of GitHub Actions: each failed check at the line of its limit.

The format is GitHub's workflow command, `::error file=F,line=L,title=T::message`
(https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.report.problems import Problem, problems

# GitHub shows no more than this many errors of a step; the last one says what is left out.
MOST = 10


def render(verdict: SuiteVerdict, root: Path | None = None) -> str:
    """One line a problem, nothing for a suite that passed.

    root: the repository, to which paths are relative; by default the workspace of the job, or here.
    """
    root = root or Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    found = problems(verdict, brief=True)
    shown = found if len(found) <= MOST else found[: MOST - 1]
    lines = [_line(problem, root) for problem in shown]
    if len(shown) < len(found):
        lines.append(f"::error title=lora-suite::{len(found) - len(shown)} more problems, see report.html")
    return "".join(f"{line}\n" for line in lines)


def annotate(verdict: SuiteVerdict) -> None:
    """Print the annotations where a job of GitHub Actions reads them; nothing anywhere else."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        sys.stdout.write(render(verdict))
        sys.stdout.flush()


def _line(problem: Problem, root: Path) -> str:
    properties = {"title": f"{problem.state} {problem.title}"}
    file, _, line = problem.source.rpartition(":")
    if file and line.isdecimal():
        properties = {"file": _relative(file, root), "line": line, **properties}
    told = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    evidence = problem.evidence
    text = "\n".join(filter(None, [problem.message, evidence.change, evidence.cause]))
    return f"::error {told}::{_escaped(text or problem.place)}"


def _relative(file: str, root: Path) -> str:
    path = Path(file).absolute()
    return path.relative_to(root.absolute()).as_posix() if path.is_relative_to(root.absolute()) else file


def _escaped(text: str, more: str = "") -> str:
    """Text that ends neither its line nor, with the characters of `more`, its property."""
    return "".join(f"%{ord(each):02X}" if each in f"%\r\n{more}" else each for each in text)
