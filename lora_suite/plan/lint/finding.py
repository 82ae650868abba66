# SPDX-License-Identifier: Apache-2.0
"""What lint reports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_suite.config.errors import ConfigError

INCOMPARABLE_ARMS = "incomparable-arms"
_PLACE = re.compile(r"^(?P<file>[^\s:]+\.(?:yaml|sh))(?::(?P<line>\d+))?: ")
_RULES = {"recipes": "recipe", "scripts": "driver"}


@dataclass(frozen=True, order=True)
class Finding:
    """One finding: where to change something (line 0: the whole file), and the rule's short name."""

    file: Path
    line: int
    severity: Literal["error", "warning"]
    rule: str
    message: str

    def __str__(self) -> str:
        """The finding on one line, in the form that editors and CI know."""
        place = f"{self.file}:{self.line}" if self.line else f"{self.file}"
        return f"{place}: {self.severity}: {self.message} [{self.rule}]"


def error(file: Path, line: int, rule: str, message: str) -> Finding:
    """A finding that makes a run pointless."""
    return Finding(_shown(file), line, "error", rule, message)


def warning(file: Path, line: int, rule: str, message: str) -> Finding:
    """A finding that should be looked at."""
    return Finding(_shown(file), line, "warning", rule, message)


def from_config_error(caught: ConfigError, file: Path, rule: str) -> list[Finding]:
    """One finding for each line of a configuration error, at the place that the line names.

    What a suite meets in a recipe or driver is that one's finding, under the name that it has there.
    """
    found = []
    for text in str(caught).splitlines():
        place = _PLACE.match(text)
        if place is None:
            found.append(error(file, 0, rule, text))
        else:
            where = Path(place["file"])
            kind = _RULES.get(where.resolve().parent.name, rule)
            found.append(error(where, int(place["line"] or 0), kind, text[place.end() :]))
    return found


def _shown(file: Path) -> Path:
    """The file as seen from the current folder, absolute where it lies elsewhere."""
    path = file.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """The findings because of which a suite must not be run.

    Arms that cannot be compared are none: their runs can be judged, and their pair gets that as its verdict.
    """
    return [each for each in findings if each.severity == "error" and each.rule != INCOMPARABLE_ARMS]
