# SPDX-License-Identifier: Apache-2.0
"""How a job ended, as the end of the run that it was in; and which ends are the machines' fault.

Only the machines' faults are repeated. A check that fails, a loss that is not finite, a crash of the trainer,
a run that takes too long are what a suite is to find.
"""

from __future__ import annotations

import re

from lora_suite.launch.record import Ended
from lora_suite.launch.slurm.scheduler import UNKNOWN, Job

_MACHINES = {
    "NODE_FAIL": "a node went down",
    "BOOT_FAIL": "a node did not start",
    "PREEMPTED": "preempted by another job",
    "REVOKED": "revoked",
}
# What NCCL, its bootstrap and Slurm's step launch say before the first step, where no trainer is at fault.
_START_UP = re.compile(
    r"ncclSystemError|ncclRemoteError|ncclUnhandledCudaError"
    r"|NCCL WARN (?:Bootstrap|Call to connect|socket|Connect)"
    r"|Failed to initialize any NET plugin"
    r"|Unable to create step for job|Job step aborted: Waiting|Communication connection failure"
    r"|Task launch for \S+ failed"
)


def machines_fault(job: Job) -> str:
    """What the machines did to a job, in words; empty where its end was not theirs."""
    said = _MACHINES.get(job.state, "")
    return f"{said} ({job.state}, job {job.id}{_place(job)})" if said else ""


def start_up_fault(ended: Ended) -> str:
    """What kept a run's processes from finding each other, in words; empty for any other end.

    Only before the first step: later the same words may be the consequence of a crash.
    """
    if ended.how not in ("failed", "killed") or (ended.step or 0) > 0:
        return ""
    text = "\n".join([ended.message, *ended.last_lines])
    found = _START_UP.search(text)
    return f"processes did not find each other: {found[0]}" if found else ""


def ended_by(job: Job, minutes: float) -> Ended:
    """The end of the run that a job was in when it ended. minutes: its time limit."""
    where = f"job {job.id}{_place(job)}"
    if job.state == "TIMEOUT":
        return Ended(how="timeout", status=143, message=f"{where} ran into its limit of {minutes:g} minutes")
    if job.state in ("CANCELLED", "DEADLINE"):
        return Ended(how="interrupted", status=130, message=f"{where} was cancelled")
    if job.state == "OUT_OF_MEMORY":
        return Ended(how="oom", status=137, message=f"{where} used more memory than it may (OUT_OF_MEMORY)")
    fault = machines_fault(job)
    if fault:
        return Ended(how="killed", status=143, message=fault)
    if job.state == UNKNOWN:
        return Ended(how="killed", status=143, message=f"{where} is gone, and nothing says how it ended")
    return Ended(how="failed", status=3, message=f"{where} ended ({job.state}) without a word of this run")


def _place(job: Job) -> str:
    return f" on {job.nodes}" if job.nodes else ""
