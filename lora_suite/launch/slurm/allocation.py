# SPDX-License-Identifier: Apache-2.0
"""Runs cases inside the allocation that is already held: the driver on its first node, trainings on all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.record import Ended
from lora_suite.launch.slurm.faults import start_up_fault
from lora_suite.launch.slurm.step import SRUN_WORDS, Allocation
from lora_suite.launch.supervise import Poll
from lora_suite.plan.model import Case, ExternalCase, PlannedRun

_START_UPS = 2


class AllocationLauncher:
    """A launcher within a Slurm allocation. Raises ConfigError outside of one.

    checkouts: see `LocalLauncher`. A run whose processes did not find each other is started once more on the
    same nodes; `repeated` says of which runs, and why.
    """

    def __init__(self, checkouts: Mapping[str, Path] | None = None) -> None:
        held = Allocation.held()
        if held is None:
            raise ConfigError(
                "--inside-allocation: there is no Slurm allocation here; call it within salloc or sbatch, or "
                "use --launcher slurm"
            )
        self.allocation = held
        self.repeated: dict[PlannedRun, str] = {}
        self._local = LocalLauncher(checkouts)
        os.environ.setdefault(SRUN_WORDS, "")

    def run(
        self, case: Case | ExternalCase, planned: PlannedRun, run_dir: Path, *, keep: bool, poll: Poll
    ) -> Ended:
        """Run a case once, see `LocalLauncher.run`."""
        if case.nodes > self.allocation.nodes:
            message = f"needs {case.nodes} nodes, job {self.allocation.job} holds {self.allocation.nodes}"
            return Ended(how="failed", status=2, message=message)
        ended = self._local.run(case, planned, run_dir, keep=keep, poll=poll)
        for number in range(1, _START_UPS):
            fault = start_up_fault(ended)
            if not fault:
                break
            put_away(run_dir, f"start-{number}")
            self.repeated[planned] = f"started again: {fault}"
            ended = self._local.run(case, planned, run_dir, keep=keep, poll=poll)
        return ended


def put_away(run_dir: Path, suffix: str) -> None:
    """Move a run directory beside itself, so that what is in it is not taken for the next attempt's."""
    shutil.move(run_dir, run_dir.with_name(f"{run_dir.name}.{suffix}"))
