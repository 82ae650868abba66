# SPDX-License-Identifier: Apache-2.0
"""The facts of the environments that runs name by their hash, for a report to show."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lora_suite.config import flatten
from lora_suite.judge.evidence import NoEvidence, read_evidence
from lora_suite.judge.verdict import RunVerdict


def environment_facts(runs: Iterable[RunVerdict]) -> dict[str, dict[str, str]]:
    """The strict facts of each environment, by the hash that runs give; what was not known is left out."""
    facts: dict[str, dict[str, str]] = {}
    for run in runs:
        if not run.environment or run.environment in facts:
            continue
        try:
            record = read_evidence(Path(run.directory)).record
        except NoEvidence:
            continue
        if record.environment is not None:
            known = flatten(record.environment.strict).items()
            facts[run.environment] = {key: str(value) for key, value in known if value is not None}
    return facts
