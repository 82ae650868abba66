# SPDX-License-Identifier: Apache-2.0
"""A baseline: the findings of one day, so that only new ones fail from then on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.plan.audit.finding import AuditFinding

SCHEMA_VERSION = 1


class _Entry(BaseModel):
    """A finding without its line, which moves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    file: str
    subject: str


class _Baseline(BaseModel):
    """The content of a baseline file."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    findings: list[_Entry]


@dataclass(frozen=True)
class Compared:
    """Findings against a baseline: those that are not in it, how many are, how many of it are gone."""

    new: tuple[AuditFinding, ...]
    known: int
    gone: int


def write_baseline(path: Path, findings: Iterable[AuditFinding]) -> None:
    """Record findings; raises ConfigError where the file cannot be written."""
    content = _Baseline(findings=[_entry(each) for each in findings])
    try:
        path.write_text(json.dumps(content.model_dump(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def compare(path: Path, findings: Iterable[AuditFinding]) -> Compared:
    """Hold findings against a baseline file; raises ConfigError for one that cannot be used.

    Of two equal findings in one file, of which the baseline has one, the second is new.
    """
    try:
        recorded = _Baseline.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; record one with --write-baseline") from error
    except ValidationError as error:
        detail = error.errors()[0]
        raise ConfigError(
            f"{path}: is no baseline: {'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        ) from error
    left = Counter(recorded.findings)
    new: list[AuditFinding] = []
    known = 0
    for finding in findings:
        entry = _entry(finding)
        if left[entry]:
            left[entry] -= 1
            known += 1
        else:
            new.append(finding)
    return Compared(tuple(new), known, left.total())


def _entry(finding: AuditFinding) -> _Entry:
    return _Entry(kind=finding.kind, file=finding.file.as_posix(), subject=finding.subject)
