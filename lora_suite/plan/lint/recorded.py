# SPDX-License-Identifier: Apache-2.0
"""Limits that the last recorded runs passed only just."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lora_suite.plan.lint.finding import Finding, warning
from lora_suite.plan.model import DeclaredCheck

# The margin below which the checker marks a pass as narrow, and how many runs are asked.
NARROW_PERCENT = 5.0
NEWEST_RUNS = 5


def lint_margins(stem: str, checks: tuple[DeclaredCheck, ...], project: Path) -> Iterator[Finding]:
    """Yield each limit that one of the newest runs under ``results/`` passed with a margin below 5 %.

    Noise alone may turn such a check red. Without recorded runs there is nothing to say.
    """
    narrowest: dict[str, float] = {}
    for path in _newest(stem, project / "results"):
        for text, margin in _margins(path):
            narrowest[text] = min(margin, narrowest.get(text, margin))
    for check in checks:
        margin = narrowest.get(check.expression, NARROW_PERCENT)
        if check.file is not None and margin < NARROW_PERCENT:
            message = f"{check.expression}: recorded runs pass with a margin of {margin:.1f} % only"
            yield warning(check.file, check.line, "no-margin", message)


def _newest(stem: str, results: Path) -> list[Path]:
    """The evidence of the newest runs of a case, of suites and by hand."""
    found = [*results.glob(f"*/*/{stem}/*/checks.json"), *results.glob(f"manual/*-{stem}/checks.json")]
    return sorted(found, key=lambda path: path.stat().st_mtime)[-NEWEST_RUNS:]


def _margins(path: Path) -> Iterator[tuple[str, float]]:
    """Yield the expression and margin of every check that passed."""
    try:
        checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
        for check in checks:
            if check["status"] == "PASS" and check["margin_percent"] is not None:
                yield check["check"], float(check["margin_percent"])
    except (OSError, ValueError, KeyError, TypeError):
        # Evidence of an older form or cut short is no evidence.
        return
