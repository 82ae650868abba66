# SPDX-License-Identifier: Apache-2.0
"""Runs one case on this machine; of our own cases the driver."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_suite.config.naming import counts_cpu_processes
from lora_suite.launch.ending import by_signal, crash, last_lines, read_record, read_tail, record_end
from lora_suite.launch.external import run_external
from lora_suite.launch.gpus import VISIBLE, Driver, Gpu, busy, visible
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended, RunDir
from lora_suite.launch.supervise import Outcome, Poll, stopped, supervise
from lora_suite.plan.model import Case, ExternalCase, PlannedRun

_REFUSED = 3
# Weights & Biases refuses longer tags.
_TAG_LENGTH = 64


class LocalLauncher:
    """Runs cases on this machine, one at a time.

    checkouts: by the name of a case of ours, the folder of another version of this program that is to train
    it. The driver runs there, and Python finds that version's modules first. devices: GPUs to run on, as
    CUDA_VISIBLE_DEVICES names them; none: those that the environment leaves. driver: of the GPUs; None where
    nothing is known of them.

    A run on GPUs of which one is in use already is not started: it would be slow, or end out of memory.
    """

    def __init__(
        self,
        checkouts: Mapping[str, Path] | None = None,
        devices: Sequence[str] = (),
        driver: Driver | None = None,
    ) -> None:
        self._checkouts = dict(checkouts or {})
        self._environment = {VISIBLE: ",".join(devices)} if devices else {}
        self._driver = driver if driver is not None else Driver.open()

    def on(self, devices: Sequence[str]) -> LocalLauncher:
        """A launcher that runs on these GPUs alone."""
        return LocalLauncher(self._checkouts, devices, self._driver)

    def devices(self) -> list[str]:
        """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them; none where they are not known."""
        return [gpu.uuid for gpu in self._gpus()]

    def run(
        self, case: Case | ExternalCase, planned: PlannedRun, run_dir: Path, *, keep: bool, poll: Poll
    ) -> Ended:
        """Run a case once and return how that ended; run.json in `run_dir` says the same.

        It and all that it starts run apart from this process' group; stdout and stderr go to ``run.log``.
        poll: called with the training's progress (None before it has any) and the log's last line. After
        ``case.minutes``, or on Ctrl-C, SIGTERM or SIGHUP, everything that the run started is gone within
        10 s. An interrupt is returned (``how == "interrupted"``) rather than raised, so that what was
        measured can still be judged: the caller starts no further run then.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        run_id = f"{case.stem}-{planned.repeat}-{secrets.token_hex(4)}"
        in_use = self._in_use(case)
        if in_use:
            ended = Ended(how="failed", status=_REFUSED, message=f"not started: {in_use}")
            record_end(run_dir, ended, run_id=run_id, case=case.stem, tree=case.tree)
            return ended
        variables = {**self._environment, **tracker_variables(planned, run_dir)}
        if isinstance(case, ExternalCase):
            return run_external(case, run_dir, run_id, poll, variables)
        checkout = self._checkouts.get(case.stem)
        outcome = supervise(
            ["bash", str(case.driver_path.resolve()), *case.overrides],
            cwd=checkout,
            environment={**_environment(case, run_dir.resolve(), keep), **modules_of(checkout), **variables},
            run_dir=run_dir,
            run_id=run_id,
            minutes=case.minutes,
            poll=poll,
        )
        ended = outcome.told(_classify(case, run_dir, run_id, outcome))
        record_end(run_dir, ended, run_id=run_id, case=case.stem, tree=case.tree)
        return ended

    def _gpus(self) -> list[Gpu]:
        environment = {**os.environ, **self._environment}
        return (visible(self._driver.gpus(), environment) or []) if self._driver is not None else []

    def _in_use(self, case: Case | ExternalCase) -> str:
        """Who is on the GPUs that a run would use, which are the first of those it may; empty if nobody."""
        if self._driver is None or counts_cpu_processes(case.stem):
            return ""
        return busy(self._driver, self._gpus()[: case.gpus])


def tracker_group(results: Path) -> str:
    """The group at Weights & Biases of everything in the folder of one suite run."""
    folder = results.resolve()
    return f"{folder.parent.name}-{folder.name}"


def tracker_variables(planned: PlannedRun, run_dir: Path) -> dict[str, str]:
    """What tells Weights & Biases to which suite run and arm a run belongs, unless the environment does.

    Its group is the folder of the suite run, so that arms stand side by side; its tags are pair and arm.
    """
    tags = ",".join(tag[:_TAG_LENGTH].replace(",", " ") for tag in (planned.pair, planned.arm) if tag)
    told = {"WANDB_RUN_GROUP": tracker_group(run_dir.resolve().parents[1]), "WANDB_TAGS": tags}
    return {name: os.environ.get(name) or value for name, value in told.items() if value}


def modules_of(checkout: Path | None) -> dict[str, str]:
    """The environment variable that lets Python find the modules of a checkout before all others."""
    if checkout is None:
        return {}
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(checkout), *([known] if known else [])])}


def _environment(case: Case, run_dir: Path, keep: bool) -> dict[str, str]:
    """The driver's environment; it finds the commands of this very installation first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        **os.environ,
        "PATH": path,
        "LORA_SUITE_RUN_DIR": str(run_dir),
        "LORA_SUITE_CASE": case.stem,
        "LORA_SUITE_KEEP": "1" if keep else "0",
        "LORA_SUITE_PLAN": "0",
    }


def _classify(case: Case, run_dir: Path, run_id: str, outcome: Outcome) -> Ended:
    """Name how the run ended."""
    progress = Progress.read(run_dir)
    step = progress.step if progress else 0
    ended = stopped(outcome, run_dir, case.minutes, f"after step {step} of {case.steps}")
    if ended is not None:
        return ended.model_copy(update={"step": step})
    text, status = read_tail(RunDir(run_dir).log), outcome.status
    if _driver_says(run_dir, status):
        return Ended(how="done", status=status)
    record = read_record(run_dir, run_id)
    if record is not None and record.ended is not None and record.ended.how != "done":
        # The training's own launcher saw more than this one can.
        return record.ended.model_copy(update={"status": status})
    if status == 130:
        return Ended(how="interrupted", status=status, message="interrupted", last_lines=last_lines(text))
    return by_signal(crash(run_dir, text, status), "the driver")


def _driver_says(run_dir: Path, status: int) -> bool:
    """Whether `status` is a driver's verdict: any script can end with 1, one that checked says so."""
    if status == 0:
        return True
    try:
        checks = json.loads(RunDir(run_dir).checks.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return checks.get("status") == status
