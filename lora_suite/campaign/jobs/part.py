# SPDX-License-Identifier: Apache-2.0
"""``python -m lora_suite.campaign.jobs.part RESULTS UNIT ATTEMPT``: what a job does.

It carries out its unit inside the allocation as `lora-suite run --inside-allocation` does a whole suite, and
writes down, run by run, what became of it. Whoever attends the suite judges.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lora_suite.campaign.execute import Executor
from lora_suite.campaign.jobs.journal import (
    Journal,
    Lines,
    Submission,
    attempt_lines,
    execution_to_json,
    run_to_json,
)
from lora_suite.campaign.jobs.units import Unit, units_of
from lora_suite.campaign.reference import against
from lora_suite.campaign.remember import Memory
from lora_suite.config.errors import ConfigError
from lora_suite.judge.suite import Execution, run_directory
from lora_suite.launch.record import RunDir
from lora_suite.launch.slurm.allocation import AllocationLauncher
from lora_suite.launch.snapshot import state_of
from lora_suite.plan.model import PlannedRun

FINISHED, BROKE = 0, 3


def main(results: Path, name: str, attempt: int) -> int:
    """Carry out a unit; returns 0 if it came to its end, whatever its runs are worth, else 3."""
    lines = attempt_lines(results, name, attempt)
    try:
        return _Part(results, name, lines).carry_out()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        lines.append(event="broke", message=str(error))
    except Exception as error:
        traceback.print_exc()
        lines.append(event="broke", message=f"{type(error).__name__}: {error}")
        raise
    return BROKE


class _Part:
    """One job's work."""

    def __init__(self, results: Path, name: str, lines: Lines) -> None:
        self._results = results
        self._lines = lines
        self._submission = Submission.read(results)
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._name = name
        self._state = Journal(results).state(name)

    def carry_out(self) -> int:
        if self._restarts > self._submission.site.retries:
            reason = f"Slurm started the job again {self._restarts} times"
            self._lines.append(event="broke", message=reason)
            return BROKE
        for folder, state in self._submission.trainers.items():
            if state_of(Path(folder)) != state:
                raise ConfigError(f"{folder}: its code has changed since this job was submitted")
        again = [*self._state.faults]
        job = os.environ["SLURM_JOB_ID"]
        if self._restarts:
            again.append(f"job {job} was put back into the queue by Slurm {self._restarts} times")
        request = self._submission.request
        with against(request, request.plan(), self._submission.reference) as (plan, checkouts):
            unit = next(unit for unit in units_of(plan) if unit.name == self._name)
            continues = unit.segments > 1
            self._keep_logs(unit) if continues else self._put_away(unit)
            launcher = AllocationLauncher(checkouts)
            self._lines.append(
                event="begin",
                job=job,
                nodes=launcher.allocation.nodelist,
                restart=self._restarts,
                checkpoints=[str(path) for path in checkpoints(self._results, unit)],
            )

            def note(planned: PlannedRun, execution: Execution | None) -> None:
                if execution is None:
                    self._lines.append(event="run", run=run_to_json(planned))
                    return
                reasons = [*again, *filter(None, [launcher.repeated.get(planned)])]
                noted = execution_to_json(replace(execution, again=tuple(reasons)))
                self._lines.append(event="ended", run=run_to_json(planned), execution=noted)

            priors = Memory.of(request.history).priors(plan)[0]
            executor = Executor(
                unit.job, self._results, launcher, request.keep, priors, note=note, continues=continues
            )
            interrupted = executor.run(Console())
        made = executor.schedule.carried_out()
        self._lines.append(
            event="finished",
            interrupted=interrupted,
            runs=[run_to_json(run) for run in made.runs],
            pairs={pair.name: {"repeats": pair.repeats, "ended": pair.ended} for pair in made.pairs},
            absent=executor.schedule.absent,
        )
        return FINISHED

    def _put_away(self, unit: Unit) -> None:
        """Move what an earlier attempt of these runs left: all of them are made on the same nodes."""
        target = self._results / "attempts" / unit.name
        for planned in unit.part.runs:
            folder = run_directory(self._results, planned)
            if folder.exists():
                number = len(list(target.glob("*")))
                target.mkdir(parents=True, exist_ok=True)
                shutil.move(folder, target / f"{number:03}-{planned.case}-{planned.repeat}")

    def _keep_logs(self, unit: Unit) -> None:
        """Move the logs of earlier segments aside: each segment writes one of its own."""
        for planned in unit.part.runs:
            log = RunDir(run_directory(self._results, planned)).log
            if log.exists():
                log.rename(log.with_name(f"run.{self._lines.path.stem}.log"))


def checkpoints(results: Path, unit: Unit) -> Iterator[Path]:
    """The checkpoints of a unit's runs, relative to the results."""
    for planned in unit.part.runs:
        folder = run_directory(results, planned)
        yield from sorted(path.relative_to(results) for path in (folder / "ckpts").glob("*"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
