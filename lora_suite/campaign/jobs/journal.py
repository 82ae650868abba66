# SPDX-License-Identifier: Apache-2.0
"""The files by which the jobs of a suite are known: what was asked for, what was submitted, what each did.

All are written in the results folder. Journals are appended to, a line of JSON at a time, and never
rewritten: whoever reads them sees everything that happened, also after a crash of whoever wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from lora_suite.campaign.request import Request
from lora_suite.config.errors import ConfigError
from lora_suite.judge.suite import Execution
from lora_suite.launch.record import Ended, write_json_atomically
from lora_suite.launch.site import Site
from lora_suite.launch.snapshot import Snapshot
from lora_suite.plan.model import PlannedRun

SUBMISSION = "submission.json"
JOURNAL = "jobs.jsonl"


class Submission(BaseModel):
    """What a suite's jobs need to know. request: its suite is the snapshot's. command, suite: as typed.

    started: when, in UTC. reference: checkout of the commit that every case is compared with. trainers: the
    folders of other trainers, which run where they are, and their state when this was submitted.
    """

    model_config = ConfigDict(extra="forbid")

    request: Request
    command: str
    suite: Path
    started: datetime
    site: Site
    snapshot: Snapshot
    reference: Path | None = None
    trainers: dict[str, str] = {}

    def write(self, results: Path) -> None:
        """Write it once, before anything is submitted."""
        write_json_atomically(results / SUBMISSION, self.model_dump(mode="json"))

    @classmethod
    def read(cls, results: Path) -> Submission:
        """Read that of a results folder; raises ConfigError where it was not submitted."""
        path = results / SUBMISSION
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{results}: no jobs were submitted from here (no {SUBMISSION}); name the folder that "
                f"`lora-suite run --launcher slurm` printed"
            ) from error
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error


class Lines:
    """A file of JSON lines that is only ever appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, **event: Any) -> None:
        """Add a line and flush it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({**event, "time": datetime.now(UTC).isoformat(timespec="seconds")})
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
            stream.flush()
            os.fsync(stream.fileno())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The whole lines, oldest first; one that is still being written is left out."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


@dataclass
class UnitState:
    """Where a unit is, by the journal.

    attempt: its newest, from 1. name, job: of that attempt; job is None while it is not known whether it was
    submitted. faults: why earlier attempts were repeated. segments: of its run that were begun.
    """

    attempt: int = 0
    name: str = ""
    job: str | None = None
    faults: list[str] = field(default_factory=list)
    segments: int = 1


class Journal:
    """jobs.jsonl of a results folder."""

    def __init__(self, results: Path) -> None:
        self.lines = Lines(results / JOURNAL)

    def state(self, unit: str) -> UnitState:
        """Where a unit is."""
        state = UnitState()
        for event in self.lines:
            if event.get("unit") != unit:
                continue
            kind = event["event"]
            if kind == "submitting":
                state.attempt, state.name, state.job = event["attempt"], event["name"], None
            elif kind == "submitted":
                state.job = event["job"]
            elif kind == "repeat":
                state.faults.append(event["reason"])
            elif kind == "segment":
                state.segments += 1
        return state

    @property
    def cancelled(self) -> bool:
        """Whether `lora-suite cancel` was asked to end it."""
        return any(event["event"] == "cancel" for event in self.lines)


def attempt_lines(results: Path, unit: str, attempt: int) -> Lines:
    """What one job of a unit writes of its runs."""
    return Lines(results / "jobs" / unit / f"{attempt}.jsonl")


_RUN, _ENDED = TypeAdapter(PlannedRun), TypeAdapter(Ended)


def run_to_json(planned: PlannedRun) -> Any:
    """A planned run as a journal holds it."""
    return _RUN.dump_python(planned, mode="json")


def run_from_json(value: Any) -> PlannedRun:
    """The planned run of `run_to_json`."""
    return _RUN.validate_python(value)


def execution_to_json(execution: Execution) -> dict[str, Any]:
    """An execution as a journal holds it."""
    return {
        "ended": execution.ended.model_dump(mode="json"),
        "launched": execution.launched.isoformat(),
        "seconds": execution.seconds,
        "again": list(execution.again),
    }


def execution_from_json(value: dict[str, Any]) -> Execution:
    """The execution of `execution_to_json`."""
    return Execution(
        ended=_ENDED.validate_python(value["ended"]),
        launched=datetime.fromisoformat(value["launched"]),
        seconds=value["seconds"],
        again=tuple(value["again"]),
    )
