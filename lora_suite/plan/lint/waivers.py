# SPDX-License-Identifier: Apache-2.0
"""Rules about waivers: one that has expired, and one that no longer relaxes anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from lora_suite.plan.lint.finding import Finding, warning
from lora_suite.plan.model import Waiver


def lint_waiver(file: Path, live: str, waiver: Waiver, today: date) -> Iterator[Finding]:
    """Yield what a waiver of the limit `live` needs now."""
    who = f"{waiver.owner}, {waiver.issue}"
    if waiver.expired(today):
        message = f"the waiver expired on {waiver.until} ({who}); the limit is again {waiver.revert_to}"
        yield warning(file, waiver.line, "waiver-expired", message)
    if _same(live, waiver.revert_to):
        message = (
            f"the live limit already is {waiver.revert_to}: the waiver relaxes nothing, remove it ({who})"
        )
        yield warning(file, waiver.line, "waiver-without-effect", message)


def _same(left: str, right: str) -> bool:
    """Whether two checks are the same but for spacing and the spelling of numbers."""
    try:
        return _canonical(left) == _canonical(right)
    except (SyntaxError, ValueError):
        return left == right


def _canonical(text: str) -> str:
    """A check as a syntax tree in which 30 and 30.0 are one number."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            node.value = float(node.value)
    return ast.dump(tree)
