# SPDX-License-Identifier: Apache-2.0
"""Runs a plan, one run after another, and judges what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from rich.console import Console

from lora_suite.campaign.adaptive import Schedule, mean_seconds
from lora_suite.campaign.live import LiveView
from lora_suite.judge.suite import Execution, Priors, judge_execution, judge_suite, run_directory
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.processes import stop_signals_interrupt, undisturbed
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Case, ExternalCase, Plan, PlannedRun, UnreadableCase

BROKE = 3
"""Exit status of a run that could not even be started."""


class Launcher(Protocol):
    """Runs one planned run to its end, whatever that is, and says how it ended."""

    def run(
        self,
        case: Case | ExternalCase,
        planned: PlannedRun,
        run_dir: Path,
        *,
        keep: bool,
        poll: Callable[[Progress | None, str], None],
    ) -> Ended:
        """Run it in `run_dir`. An interrupt is returned as `interrupted`, or raised as KeyboardInterrupt."""
        ...


def execute(
    plan: Plan,
    results: Path,
    launcher: Launcher,
    console: Console,
    *,
    keep: bool,
    priors: Priors | None = None,
) -> SuiteVerdict:
    """Run everything that is planned and needed, one after another, and judge it.

    A run that breaks stops no other. An interrupt stops the suite: what was measured is judged, the rest is
    MISSING. priors: by pair and check, what earlier repeats say of the spread.
    """
    started = datetime.now(UTC)
    clock = time.monotonic()
    executor = _Executor(plan, results, launcher, keep, priors)
    interrupted = executor.run(console)
    with undisturbed():
        runs, pairs = judge_suite(
            executor.schedule.carried_out(),
            results,
            executor.executions,
            absent=executor.schedule.absent,
            priors=priors,
        )
    return SuiteVerdict(
        suite=plan.suite,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        directory=str(results),
        interrupted=interrupted,
        runs=runs,
        pairs=pairs,
    )


@dataclass
class _Executor:
    """Executes the runs of one plan, and notes what became of each."""

    plan: Plan
    results: Path
    launcher: Launcher
    keep: bool
    priors: Priors | None
    executions: dict[PlannedRun, Execution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin the schedule, and so the budget."""
        self.schedule = Schedule(
            self.plan,
            self.executions,
            lambda part: judge_suite(part, self.results, self.executions, priors=self.priors)[1][0],
        )

    def run(self, console: Console) -> bool:
        """Execute what the schedule asks for; return whether it was interrupted."""
        at_most = any(pair.looks for pair in self.plan.pairs)
        with LiveView(console, len(self.plan.runs), at_most=at_most) as view:
            try:
                with stop_signals_interrupt():
                    return any(self._execute(planned, view) for planned in self.schedule)
            except KeyboardInterrupt:
                return True

    def _execute(self, planned: PlannedRun, view: LiveView) -> bool:
        """Execute one run, note it down and show it; return whether the suite was interrupted."""
        case = self.plan.cases[planned.case]
        run_dir = run_directory(self.results, planned)
        view.begin(planned, case, self._seconds_left())
        if isinstance(case, UnreadableCase):
            view.end(judge_execution(self.plan, planned, run_dir, None))
            return False
        launched = datetime.now(UTC)
        clock = time.monotonic()
        try:
            # A folder that is there already holds another run's files.
            run_dir.mkdir(parents=True)
            ended = self.launcher.run(case, planned, run_dir, keep=self.keep, poll=view.look)
        except KeyboardInterrupt:
            ended = Ended(how="interrupted", status=130, message="interrupted")
        except OSError as error:
            ended = Ended(how="failed", status=BROKE, message=f"{error.filename}: {error.strerror}")
        self.executions[planned] = Execution(ended, launched, time.monotonic() - clock)
        view.end(judge_execution(self.plan, planned, run_dir, self.executions[planned]))
        return ended.how == "interrupted"

    def _seconds_left(self) -> float | None:
        """Time that the next run and those asked for after it take; None before each case has run once."""
        known: Mapping[str, float] = mean_seconds(self.executions)
        cases = [run.case for run in self.schedule.rest()]
        return sum(known[case] for case in cases) if all(case in known for case in cases) else None
