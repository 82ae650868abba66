# SPDX-License-Identifier: Apache-2.0
"""Runs one command of a run on this machine: logs it, enforces its minutes, leaves no process behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_suite.launch.ending import last_lines, read_tail
from lora_suite.launch.processes import end_run, stop_signals_interrupt, undisturbed
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended, RunDir

RUN_ID = "LORA_SUITE_RUN_ID"
POLL_SECONDS = 0.2
GRACE_SECONDS = 6.0

Poll = Callable[[Progress | None, str], None]
Stop = Literal["timeout", "interrupted"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    status: as a shell gives it (128 + signal for a signal). stop: why it was stopped, None if it ended by
    itself. left: processes of the run that could not be ended.
    """

    status: int
    stop: Stop | None
    left: tuple[int, ...]

    def told(self, ended: Ended) -> Ended:
        """`ended`, with the processes that are still alive."""
        if not self.left:
            return ended
        alive = f"still alive: {list(self.left)}"
        return ended.model_copy(update={"message": f"{ended.message}; {alive}".lstrip("; ")})


def supervise(
    command: Sequence[str],
    *,
    cwd: Path | None,
    environment: Mapping[str, str],
    run_dir: Path,
    run_id: str,
    minutes: float,
    poll: Poll,
) -> Outcome:
    """Run a command to its end, in a group of its own; stdout and stderr go to ``run.log`` of `run_dir`.

    environment: the command's; the run's mark is added, by which all that it starts is found and ended. poll:
    called every `POLL_SECONDS` with the training's progress (None before it has any) and the log's last line.
    After `minutes`, or on Ctrl-C, SIGTERM or SIGHUP, everything that was started is gone within 10 s. An
    interrupt is returned rather than raised. Raises OSError if the command cannot be started.
    """
    with stop_signals_interrupt(), RunDir(run_dir).log.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment, RUN_ID: run_id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stop = _watch(process, run_dir, minutes * 60.0, poll)
        with undisturbed():
            # Also after a normal end: a run must not leave processes behind that disturb the next one.
            left = end_run(process, RUN_ID, run_id, grace=GRACE_SECONDS)
    return Outcome(_status(process), stop, tuple(left))


def stopped(outcome: Outcome, run_dir: Path, minutes: float, place: str) -> Ended | None:
    """How a run ended that was stopped; None if it ended by itself. place: how far it came, in words."""
    if outcome.stop is None:
        return None
    why = f"ran longer than {minutes:g} minutes" if outcome.stop == "timeout" else "interrupted"
    lines = last_lines(read_tail(RunDir(run_dir).log))
    return Ended(how=outcome.stop, status=outcome.status, message=f"{why}, {place}", last_lines=lines)


def _watch(process: subprocess.Popen[bytes], run_dir: Path, seconds: float, poll: Poll) -> Stop | None:
    """Wait for the command; return why it must be stopped, None if it ended by itself."""
    deadline = time.monotonic() + seconds
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return "timeout"
            poll(Progress.read(run_dir), next(iter(last_lines(read_tail(RunDir(run_dir).log), 1)), ""))
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return "interrupted"
    return None


def _status(process: subprocess.Popen[bytes]) -> int:
    """Exit status as a shell gives it: 128 + signal for a signal."""
    code = process.returncode
    if code is None:
        return 128 + 9
    return code if code >= 0 else 128 - code
