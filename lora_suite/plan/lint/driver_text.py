# SPDX-License-Identifier: Apache-2.0
"""Rules about a driver's text: what bash would silently do with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lora_suite.plan.lint.finding import Finding, warning
from lora_suite.plan.lint.shell import unquoted_lines

_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*]\})")
_PIPEFAIL = re.compile(r"\bset\s.*\bpipefail\b|(?:\bsource|^\s*\.)\s.*common\.sh")
_PIPE = re.compile(r"(?<![|>])\|(?!\|)")


def lint_driver_text(path: Path, text: str) -> Iterator[Finding]:
    """Yield arguments that bash would split or expand, and pipes whose first command may fail unnoticed."""
    lines = text.splitlines()
    guarded = False
    for number, code in unquoted_lines(text):
        if _ARGUMENTS.search(code):
            message = 'write "$@": unquoted, bash splits it into words and expands patterns'
            yield warning(path, number, "unquoted-arguments", message)
        # A file name may be quoted, so the whole line is asked whether it sets the guard.
        guarded = guarded or (bool(code.strip()) and _PIPEFAIL.search(lines[number - 1]) is not None)
        if not guarded and _PIPE.search(code):
            message = "before `set -o pipefail`, a pipe hides the failure of its first command"
            yield warning(path, number, "pipe-before-pipefail", message)
