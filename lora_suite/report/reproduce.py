# SPDX-License-Identifier: Apache-2.0
"""The command that runs a suite again."""

from __future__ import annotations

import shlex

from lora_suite.judge.verdict import SuiteVerdict


def command(verdict: SuiteVerdict, select: str = "") -> str:
    """What to type to run the suite again as it was run; with `select`, only what it names."""
    again = verdict.command or shlex.join(["lora-suite", "run", f"suites/{verdict.suite}.yaml"])
    return f"{again} -k {shlex.quote(select)}" if select else again
