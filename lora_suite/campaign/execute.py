# SPDX-License-Identifier: Apache-2.0
"""Runs a plan and judges what came of it: one run after another, unless cases outside pairs may share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from rich.console import Console

from lora_suite.campaign.adaptive import Schedule, mean_seconds
from lora_suite.campaign.live import LiveView
from lora_suite.campaign.side_by_side import Poll, SideBySide, gpus_needed
from lora_suite.judge.suite import (
    DID_NOT_RUN,
    Execution,
    Priors,
    judge_execution,
    judge_suite,
    run_directory,
)
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.processes import stop_signals_interrupt, undisturbed
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended
from lora_suite.plan.model import AnyCase, Case, ExternalCase, Plan, PlannedRun, UnreadableCase

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


class Ration(Protocol):
    """What may still be spent. A run that it refuses is MISSING, with the reason."""

    def refusal(self, case: AnyCase) -> str:
        """Why no run of the case may begin, empty where it may; that is then reserved."""
        ...

    def spent(self, case: AnyCase, seconds: float) -> None:
        """A run of the case ended after so long."""
        ...


@dataclass(frozen=True)
class Sharing:
    """How runs outside pairs share the machine.

    slots: how many of them may be under way at once. devices: the GPUs that they share, as
    CUDA_VISIBLE_DEVICES names them. on: a launcher that runs on some of these alone.
    """

    slots: int
    devices: Sequence[str]
    on: Callable[[Sequence[str]], Launcher]


def execute(
    plan: Plan,
    results: Path,
    launcher: Launcher,
    console: Console,
    *,
    keep: bool,
    priors: Priors | None = None,
    sharing: Sharing | None = None,
    ration: Ration | None = None,
) -> SuiteVerdict:
    """Run everything that is planned and needed, one after another, and judge it.

    A run that breaks stops no other. An interrupt stops the suite: what was measured is judged, the rest is
    MISSING. priors: by pair and check, what earlier repeats say of the spread. sharing: lets cases outside
    pairs run side by side. ration: is asked before every run.
    """
    started = datetime.now(UTC)
    clock = time.monotonic()
    executor = Executor(plan, results, launcher, keep, priors, sharing=sharing, ration=ration)
    interrupted = executor.run(console)
    with undisturbed():
        runs, pairs = judge_suite(
            executor.schedule.carried_out(),
            results,
            executor.executions,
            absent=executor.absent,
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
class Executor:
    """Executes the runs of one plan, and notes what became of each.

    note: called when a run begins, and with what became of it when it has ended. continues: whether a run
    goes on in a run directory that is there. sharing, ration: see `execute`.
    """

    plan: Plan
    results: Path
    launcher: Launcher
    keep: bool
    priors: Priors | None
    executions: dict[PlannedRun, Execution] = field(default_factory=dict)
    note: Callable[[PlannedRun, Execution | None], None] = lambda planned, execution: None
    continues: bool = False
    sharing: Sharing | None = None
    ration: Ration | None = None

    def __post_init__(self) -> None:
        """Begin the schedule, and so the budget."""
        self.schedule = Schedule(
            self.plan,
            self.executions,
            lambda part: judge_suite(part, self.results, self.executions, priors=self.priors)[1][0],
        )
        self._refused = ""
        sharing = self.sharing or Sharing(1, (), lambda devices: self.launcher)
        self._beside = SideBySide(
            sharing.slots,
            sharing.devices,
            lambda planned, devices, poll: self._launched(sharing.on(devices), planned, poll),
        )

    @property
    def absent(self) -> str:
        """Why a run that was asked for did not run."""
        return f"{DID_NOT_RUN}: {self._refused}" if self._refused else self.schedule.absent

    def run(self, console: Console) -> bool:
        """Execute what the schedule asks for; return whether it was interrupted."""
        at_most = any(pair.looks for pair in self.plan.pairs)
        with LiveView(console, len(self.plan.runs), at_most=at_most) as view:
            interrupted = True
            try:
                with stop_signals_interrupt():
                    interrupted = any(self._execute(planned, view) for planned in self.schedule)
                    interrupted = interrupted or self._drained(view)
            except KeyboardInterrupt:
                interrupted = True
            with undisturbed():
                self._beside.stop()
                self._drained(view)
            return interrupted

    def _drained(self, view: LiveView) -> bool:
        """Wait for all runs that are under way; return whether one of them was interrupted."""
        interrupted = [self._noted(*done, view) for done in self._beside.drain()]
        return any(interrupted)

    def _execute(self, planned: PlannedRun, view: LiveView) -> bool:
        """Execute one run, or begin it where it may share; return whether the suite was interrupted."""
        case = self.plan.cases[planned.case]
        if isinstance(case, UnreadableCase):
            view.begin(planned, case)
            view.end(judge_execution(self.plan, planned, run_directory(self.results, planned), None))
            return False
        refusal = self.ration.refusal(case) if self.ration is not None else ""
        if refusal:
            self._refused = self._refused or refusal
            return False
        if self.sharing is not None and planned.pair is None:
            interrupted = [
                self._noted(*done, view) for done in self._beside.begin(planned, gpus_needed(case))
            ]
            return any(interrupted)
        if self._drained(view):
            return True
        view.begin(planned, case, self._seconds_left())
        return self._noted(planned, self._launched(self.launcher, planned, view.look), view, begun=True)

    def _launched(self, launcher: Launcher, planned: PlannedRun, poll: Poll) -> Execution:
        """Have one run made; the only part of this that happens in other threads, too."""
        case = self.plan.cases[planned.case]
        assert not isinstance(case, UnreadableCase)
        run_dir = run_directory(self.results, planned)
        self.note(planned, None)
        launched = datetime.now(UTC)
        clock = time.monotonic()
        try:
            # A folder that is there already holds another run's files.
            run_dir.mkdir(parents=True, exist_ok=self.continues)
            ended = launcher.run(case, planned, run_dir, keep=self.keep, poll=poll)
        except KeyboardInterrupt:
            ended = Ended(how="interrupted", status=130, message="interrupted")
        except OSError as error:
            ended = Ended(how="failed", status=BROKE, message=f"{error.filename}: {error.strerror}")
        return Execution(ended, launched, time.monotonic() - clock)

    def _noted(
        self, planned: PlannedRun, execution: Execution, view: LiveView, *, begun: bool = False
    ) -> bool:
        """Note what became of a run and show it; return whether it was interrupted."""
        case = self.plan.cases[planned.case]
        self.executions[planned] = execution
        self.note(planned, execution)
        if self.ration is not None:
            self.ration.spent(case, execution.seconds)
        if not begun:
            view.begin(planned, case, self._seconds_left())
        view.end(judge_execution(self.plan, planned, run_directory(self.results, planned), execution))
        return execution.ended.how == "interrupted"

    def _seconds_left(self) -> float | None:
        """Time that the next run and those asked for after it take; None before each case has run once."""
        known: Mapping[str, float] = mean_seconds(self.executions)
        cases = [run.case for run in self.schedule.rest()]
        return sum(known[case] for case in cases) if all(case in known for case in cases) else None
