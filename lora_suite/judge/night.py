# SPDX-License-Identifier: Apache-2.0
"""What became of a nightly job: the model of `night.json`."""

from __future__ import annotations

from pydantic import Field

from lora_suite.judge.verdict import Model

INTERRUPTED = 130
USAGE = 2
MISSING = 4
_PRECEDENCE = (INTERRUPTED, USAGE, 3, MISSING, 1, 5, 0)


class SuiteOutcome(Model):
    """One suite of a night.

    outcome: its worst state in words. message: why it did not run. directory: relative to the night's folder,
    empty where nothing ran. counts: verdicts by state. problems: first lines of the worst, ten at most.
    gpu_hours: what its runs took.
    """

    name: str
    suite: str
    exit_code: int
    outcome: str
    message: str = ""
    directory: str = ""
    seconds: float = 0.0
    gpu_hours: float = 0.0
    counts: dict[str, int] = Field(default_factory=dict)
    problems: list[str] = Field(default_factory=list)


class NightVerdict(Model):
    """A whole night. started: local time, with its zone.."""

    schema_version: int = 1
    started: str
    seconds: float
    host: str
    directory: str
    gpu_hours: float
    suites: list[SuiteOutcome]
    notes: list[str] = Field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The worst of its suites': 130, 2, 3, 4, 1, 5, 0."""
        codes = [suite.exit_code for suite in self.suites]
        return next(code for code in _PRECEDENCE if code in codes)
