# SPDX-License-Identifier: Apache-2.0
"""The YAML of a nightly job: which suites, when, at what cost, and what becomes of it."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lora_suite.config.errors import ConfigError
from lora_suite.config.nearest import similar_file
from lora_suite.plan.suite_file import Count, Entry, Name
from lora_suite.plan.yaml_model import Blocks, read_model

_CLOCK = re.compile(r"([01]\d|2[0-3]):[0-5]\d")
Positive = Annotated[float, Field(gt=0)]


class SuiteEntry(Entry):
    """One suite of the night: its file, relative to this one, and what `lora-suite run` is told of it.

    name: of its row in the summary; without one, the file's stem. tier, select, overrides, repeats,
    budget_minutes, slots: as -m, -k, OVERRIDE, --repeats, --budget and --slots.
    """

    suite: Name
    name: Name | None = None
    tier: Name | None = None
    select: Name | None = None
    overrides: list[Name] = Field(default_factory=list)
    repeats: Count | None = None
    budget_minutes: Positive | None = None
    slots: Count = 1

    @property
    def title(self) -> str:
        """What the summary calls it."""
        return self.name or Path(self.suite).stem


class Window(Entry):
    """The hours, in this machine's local time, in which runs may be under way; `end` may be the next day."""

    begin: Name
    end: Name

    @field_validator("begin", "end")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        if not _CLOCK.fullmatch(text):
            raise ValueError(f'{text!r} is no time of day; write it as "22:30"')
        return text

    def closes(self, now: datetime) -> datetime | None:
        """When the window that `now` lies in ends; None outside of it. Equal times are a whole day."""
        begin, end = time.fromisoformat(self.begin), time.fromisoformat(self.end)
        today = datetime.combine(now.date(), end, now.tzinfo)
        if begin < end:
            return today if begin <= now.time() < end else None
        if now.time() >= begin:
            return today + timedelta(days=1)
        return today if now.time() < end else None


class Keep(Entry):
    """How long folders of nights stay: the newest `nights`, and of those none that is older than `days`."""

    nights: Count | None = None
    days: Count | None = None


class WebhookEntry(Entry):
    """Whom to tell, in the form that Slack reads.

    url_env: environment variable that holds the address, which is a secret. when: `problem` (every exit code
    but 0) or `always`. link: where people find the results. timeout_seconds: the longest that it may take.
    """

    url_env: Name
    when: Literal["problem", "always"] = "problem"
    link: Name | None = None
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 10.0


class NightlyFile(Entry):
    """A whole nightly job. Paths are relative to its file.

    results: folder that gets a folder for each night. history: the store that all runs are recorded to;
    without one, `history.db` there. gpu_hours: what a night may cost. launcher, site: as --launcher, --site.
    """

    suites: Annotated[list[SuiteEntry], Field(min_length=1)]
    window: Window | None = None
    gpu_hours: Positive | None = None
    launcher: Literal["local", "slurm"] | None = None
    site: Name | None = None
    results: Name = "nights"
    history: Name | None = None
    keep: Keep = Keep()
    webhook: WebhookEntry | None = None

    @field_validator("suites", mode="before")
    @classmethod
    def _paths_are_suites(cls, suites: Any) -> Any:
        """A bare path is a suite without extras."""
        if not isinstance(suites, list):
            return suites
        return [{"suite": entry} if isinstance(entry, str) else entry for entry in suites]

    @field_validator("suites")
    @classmethod
    def _titles_differ(cls, suites: list[SuiteEntry]) -> list[SuiteEntry]:
        titles = [entry.title for entry in suites]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"{title} stands twice; give each a `name` of its own")
        return suites


_BLOCKS: Blocks = {"suites": SuiteEntry, "window": Window, "keep": Keep, "webhook": WebhookEntry}


def read_nightly(path: Path) -> NightlyFile:
    """Read and check the file of a nightly job; raises ConfigError naming file, line and key."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such nightly job{similar_file(path)}")
    return read_model(path, NightlyFile, _BLOCKS)
