# SPDX-License-Identifier: Apache-2.0
"""Slurm's commands: submit a script, look at the queue, ask how a job ended, end jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.launch.site import Site
from lora_suite.launch.slurm.step import slurm

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT"})
ALIVE = WAITING | frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"})
UNKNOWN = "UNKNOWN"
_JOB_ID = re.compile(r"^(\d+)(?:;\S*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A job as Slurm knows it. state: its name in full. reason: why it waits or ended. nodes: its list."""

    id: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def alive(self) -> bool:
        """Whether it may still do something."""
        return self.state in ALIVE


def submit(site: Site, script: Path) -> str:
    """Submit a script; returns the job's id. Raises ConfigError with what the site's command says."""
    said = slurm(*site.submit, str(script))
    found = _JOB_ID.findall(said)
    if not found:
        raise ConfigError(f"{site.submit[0]} printed no job id, but: {said!r}")
    return str(found[-1])


def jobs_of_user() -> dict[str, Job]:
    """The jobs of this user that Slurm still remembers, by id, ended ones among them; raises ConfigError."""
    listed = slurm("squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r|%N|%j")
    found = {}
    for line in listed.splitlines():
        number, state, reason, nodes, name = line.split("|", 4)
        found[number] = Job(number, name, state, reason, nodes)
    return found


def forgotten(number: str, name: str) -> Job:
    """How a job ended that the queue no longer lists, as far as the accounting knows.

    Its state is `UNKNOWN` where there is no accounting.
    """
    # Without a database sacct can read the file of completed jobs.
    for form in ((), ("--completion",)):
        try:
            said = slurm("sacct", *form, f"--jobs={number}", "--noheader", "--parsable2", "--format=State")
        except ConfigError:
            continue
        if said:
            return Job(number, name, said.splitlines()[0].split()[0])
    return Job(number, name, UNKNOWN)


def cancel(jobs: Sequence[Job]) -> None:
    """End jobs; raises ConfigError with what Slurm says."""
    if jobs:
        slurm("scancel", *(job.id for job in jobs))
