# SPDX-License-Identifier: Apache-2.0
"""What the history keeps: facts that are never changed, each under a hash of its content.

Because a fact's id follows from what it says, the same artefacts give the same ids wherever and however often
they are imported, and stores of parallel jobs merge by leaving out what is there already. These models are
also the lines of an export.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, date, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lora_suite.judge.verdict import State

UNKNOWN_ENVIRONMENT = ""
Label = Literal["real", "noise", "expected"]


class Fact(BaseModel):
    """Base of the facts: closed to unknown keys, never changed, finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Trace(Fact):
    """One metric of one run, step by step; in 32-bit numbers: the JSON artefact has the exact ones."""

    steps: list[int]
    values: list[float]


class RunFact(Fact):
    """One run of a suite.

    case, pair, arm, repeat: what it was planned for. run_id: as its record says, empty without one. version:
    hash of its resolved recipe, less names and paths. environment: hash of its strict facts,
    empty where they were not recorded. code: commit of the trainer. values: a figure a metric, such as the
    median step time in s. health: what was wrong with the machine. traces: thinned away by `history prune`.
    """

    case: str
    repeat: int
    pair: str | None = None
    arm: str | None = None
    run_id: str = ""
    started: str
    version: str = ""
    environment: str = UNKNOWN_ENVIRONMENT
    code: str = ""
    state: State
    seconds: float | None = None
    values: dict[str, float] = Field(default_factory=dict)
    health: list[str] = Field(default_factory=list)
    traces: dict[str, Trace] = Field(default_factory=dict)


class PairFact(Fact):
    """One ratio of a pair in one suite run: of each repeat, with the interval that it was judged on.

    version, environment: hashes over those of its arms' runs.
    """

    pair: str
    expression: str
    operator: str
    version: str
    environment: str
    state: State
    estimate: float
    low: float
    high: float
    ratios: list[float]


class SessionFact(Fact):
    """One run of a suite, with everything measured in it.

    name: of the folder that it was given. folder: where it was read from. environments: strict facts by their
    hash.
    """

    kind: Literal["session"] = "session"
    suite: str
    name: str
    started: str
    seconds: float
    exit_code: int
    folder: str
    runs: list[RunFact]
    pairs: list[PairFact] = Field(default_factory=list)
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("started")
    @classmethod
    def _in_utc(cls, value: str) -> str:
        return utc(value)

    @property
    def id(self) -> str:
        """Hash of which runs these were. Where they lie and how they were judged is not part of it."""
        runs = sorted([run.case, run.repeat, run.run_id] for run in self.runs)
        return content_id([self.suite, self.name, self.started, runs])


class BaselineFact(Fact):
    """A named point of reference: the figures of one suite run, and why it was chosen."""

    kind: Literal["baseline"] = "baseline"
    name: str
    created: str
    by: str
    why: str
    session: SessionFact

    @property
    def id(self) -> str:
        """Hash of the name, the time and the suite run."""
        return content_id([self.name, self.created, self.session.id])


class AckFact(Fact):
    """Somebody's answer to an alert.

    case, metric, environment, version: the series. run_id, started: the first bad run, from which a new level
    begins; last: when the last night that was answered for started. label: `real` (a regression that is
    known), `expected` (a change that is meant), `noise`. until: the last day on which it counts; None: for
    good.
    """

    kind: Literal["ack"] = "ack"
    case: str
    metric: str
    environment: str
    version: str
    run_id: str
    started: str
    last: str
    label: Label
    note: str
    by: str
    created: str
    until: date | None = None

    @property
    def id(self) -> str:
        """Hash of all it says."""
        return content_id(self.model_dump(mode="json"))

    def counts(self, today: date) -> bool:
        """Whether it still answers for the alert."""
        return self.until is None or today <= self.until


def content_id(content: Any) -> str:
    """16 hexadecimal digits that depend on every value of a JSON document, and on nothing else."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def utc(text: str) -> str:
    """An ISO time in UTC, so that times sort as text; without a zone it is this machine's."""
    return datetime.fromisoformat(text).astimezone(UTC).isoformat(timespec="seconds")


def now() -> str:
    """This moment, to the millisecond, so that answers given one after another stay in order."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
