# SPDX-License-Identifier: Apache-2.0
"""Runs one case's driver on this machine: watches it, enforces its minutes, leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from lora_suite.launch.ending import crash, last_lines, read_record, read_tail, record_end
from lora_suite.launch.processes import end_run, stop_signals_interrupt, undisturbed
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended, RunDir
from lora_suite.plan.model import Case, PlannedRun

RUN_ID = "LORA_SUITE_RUN_ID"
POLL_SECONDS = 0.2
GRACE_SECONDS = 6.0

Poll = Callable[[Progress | None, str], None]
Stop = Literal["timeout", "interrupted"]


class LocalLauncher:
    """Runs drivers on this machine, one at a time."""

    def run(self, case: Case, planned: PlannedRun, run_dir: Path, *, keep: bool, poll: Poll) -> Ended:
        """Run the driver of `case` once and return how that ended; run.json in `run_dir` says the same.

        The driver and all it starts run apart from this process' group; stdout and stderr go to ``run.log``.
        poll: called every `POLL_SECONDS` with the training's progress (None before it has any) and the log's
        last line. After ``case.minutes``, or on Ctrl-C, SIGTERM or SIGHUP, everything that the run started is
        gone within 10 s. An interrupt is returned (``how == "interrupted"``) rather than raised, so that what
        was measured can still be judged: the caller starts no further run then.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        run_id = f"{case.stem}-{planned.repeat}-{secrets.token_hex(4)}"
        environment = _environment(case, run_dir.resolve(), run_id, keep)
        with stop_signals_interrupt(), RunDir(run_dir).log.open("wb") as log:
            process = subprocess.Popen(
                ["bash", str(case.driver_path.resolve()), *case.overrides],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stop = _watch(process, run_dir, case.minutes * 60.0, poll)
            with undisturbed():
                # Also after a normal end: a driver must not leave processes behind that disturb the next run.
                left = end_run(process, RUN_ID, run_id, grace=GRACE_SECONDS)
        ended = _classify(case, run_dir, run_id, _status(process), stop)
        if left:
            ended = ended.model_copy(update={"message": f"{ended.message}; still alive: {left}".lstrip("; ")})
        record_end(run_dir, ended, run_id=run_id, case=case.stem, tree=case.tree)
        return ended


def _environment(case: Case, run_dir: Path, run_id: str, keep: bool) -> dict[str, str]:
    """The driver's environment; it finds the commands of this very installation first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        **os.environ,
        "PATH": path,
        "LORA_SUITE_RUN_DIR": str(run_dir),
        RUN_ID: run_id,
        "LORA_SUITE_CASE": case.stem,
        "LORA_SUITE_KEEP": "1" if keep else "0",
        "LORA_SUITE_PLAN": "0",
    }


def _watch(process: subprocess.Popen[bytes], run_dir: Path, seconds: float, poll: Poll) -> Stop | None:
    """Wait for the driver; return why it must be stopped, None if it ended by itself."""
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


def _classify(case: Case, run_dir: Path, run_id: str, status: int, stop: Stop | None) -> Ended:
    """Name how the run ended."""
    progress = Progress.read(run_dir)
    text = read_tail(RunDir(run_dir).log)
    step = progress.step if progress else 0
    if stop is not None:
        why = f"ran longer than {case.minutes:g} minutes" if stop == "timeout" else "interrupted"
        message = f"{why}, after step {step} of {case.steps}"
        return Ended(how=stop, status=status, step=step, message=message, last_lines=last_lines(text))
    if _driver_says(run_dir, status):
        return Ended(how="done", status=status)
    record = read_record(run_dir, run_id)
    if record is not None and record.ended is not None and record.ended.how != "done":
        # The training's own launcher saw more than this one can.
        return record.ended.model_copy(update={"status": status})
    if status == 130:
        return Ended(how="interrupted", status=status, message="interrupted", last_lines=last_lines(text))
    ended = crash(run_dir, text, status)
    if ended.how == "failed" and status > 128:
        message = f"the driver was ended by signal {status - 128}"
        return ended.model_copy(update={"how": "killed", "message": message})
    return ended


def _driver_says(run_dir: Path, status: int) -> bool:
    """Whether `status` is a driver's verdict: any script can end with 1, one that checked says so."""
    if status == 0:
        return True
    try:
        checks = json.loads(RunDir(run_dir).checks.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return checks.get("status") == status
