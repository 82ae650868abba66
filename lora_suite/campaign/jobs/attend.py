# SPDX-License-Identifier: Apache-2.0
"""Submits a suite's jobs, follows them, repeats what the machines spoilt, and judges when all have ended.

Nothing of it is kept in this process alone: `attach` goes on where another one was ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.jobs.journal import Journal, Submission, UnitState, attempt_lines
from lora_suite.campaign.jobs.outcome import Done, Outcome, continues, fault_of, settle
from lora_suite.campaign.jobs.units import Unit, refuse_too_large, units_of
from lora_suite.campaign.reference import against
from lora_suite.campaign.remember import Memory
from lora_suite.campaign.repository import Repository
from lora_suite.campaign.request import Request
from lora_suite.config.errors import ConfigError
from lora_suite.judge.suite import Execution, Priors, judge_execution, judge_suite, run_directory
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.processes import stop_signals_interrupt, undisturbed
from lora_suite.launch.site import Site, load_site
from lora_suite.launch.slurm.scheduler import Job, cancel, forgotten, jobs_of_user, submit
from lora_suite.launch.slurm.script import JobScript
from lora_suite.launch.snapshot import Snapshot, check_out, state_of, take
from lora_suite.plan.external.load import Moved
from lora_suite.plan.model import ExternalCase, Plan, PlannedRun

_LOCK = ".attended"
# NFS clients see each other's writes after up to a minute.
_LAG_SECONDS = 60.0
CODE = "code"


def prepare(request: Request, asked: Plan, plan: Plan, make_results: Callable[[], Path]) -> Path:
    """Take the snapshot and write down what the jobs need to know, before anything runs.

    asked: the plan of the request. plan: as it is carried out. Returns the results folder, which
    `make_results` makes. Raises ConfigError.
    """
    site = load_site(request.site)
    refuse_too_large(plan, units_of(plan), site)
    shown = make_results()
    results = shown.resolve()
    snapshot = take(request.suite, results / CODE, [request.results.resolve(), results])
    history, reference = Memory.of(request.history).path, None
    if request.ref is not None:
        commit = Repository(snapshot.folder).commit(request.ref)
        reference = check_out(snapshot.source, commit.sha, results / CODE)
    Submission(
        request=replace(
            request,
            suite=snapshot.moved(request.suite),
            results=results,
            moved=Moved(
                request.suite.resolve(),
                *((snapshot.source, snapshot.folder) if snapshot.commit is not None else ()),
            ),
            history=history.resolve() if history is not None else None,
            rerun_failed=request.rerun_failed.resolve() if request.rerun_failed is not None else None,
        ),
        command=request.command,
        suite=request.suite,
        started=datetime.now(UTC),
        site=site,
        snapshot=snapshot,
        reference=reference,
        trainers=_trainers(asked, snapshot),
    ).write(results)
    return shown


def _trainers(plan: Plan, snapshot: Snapshot) -> dict[str, str]:
    """The state of each external case's folder that is not in the snapshot, and so may change."""
    folders = {case.cwd for case in plan.cases.values() if isinstance(case, ExternalCase)}
    outside = [
        folder for folder in folders if snapshot.commit is None or not folder.is_relative_to(snapshot.source)
    ]
    return {str(folder): state for folder in outside if (state := state_of(folder)) is not None}


@dataclass(frozen=True)
class Attended:
    """A suite whose jobs have ended. unknown: why its pairs have no priors, where the history fails."""

    submission: Submission
    plan: Plan
    verdict: SuiteVerdict
    unknown: str

    def tidy(self) -> None:
        """Remove the snapshot, unless what runs left is kept: the verdict is stored."""
        if not self.submission.request.keep:
            self.submission.snapshot.remove(*filter(None, [self.submission.reference]))


def attend(results: Path, console: Console) -> Attended:
    """Follow the jobs of a results folder to their end, submit those that are not there yet, and judge.

    Raises ConfigError where nothing was submitted from here or another process attends to it, and
    KeyboardInterrupt (also for SIGTERM and SIGHUP): the jobs go on then.
    """
    results = results.resolve()
    submission = Submission.read(results)
    request = submission.request
    with _alone(results), against(request, request.plan(), submission.reference) as (plan, _):
        attendance = _Attendance(results, submission, units_of(plan), console)
        with stop_signals_interrupt():
            done = attendance.follow()
        with undisturbed():
            priors, unknown = Memory.of(request.history).priors(plan)
            verdict = _judge(plan, results, submission, done, attendance.cancelled, priors)
            return Attended(submission, plan, verdict, unknown)


def cancel_jobs(results: Path) -> list[Job]:
    """End the jobs of a results folder that are alive, and no others; returns them.

    A job is only ended if it still has the name that it was submitted under. Raises ConfigError.
    """
    results = results.resolve()
    Submission.read(results)
    journal = Journal(results)
    journal.lines.append(event="cancel")
    names = {event["name"] for event in journal.lines if event["event"] == "submitting"}
    found = [job for job in jobs_of_user().values() if job.name in names and job.alive]
    cancel(found)
    return found


class _Attendance:
    """Follows the units of one results folder."""

    def __init__(self, results: Path, submission: Submission, units: list[Unit], console: Console) -> None:
        self._results = results
        self._submission = submission
        self._units = {unit.name: unit for unit in units}
        self._journal = Journal(results)
        self._console = console
        self._said: dict[str, str] = {}
        self._ended: dict[str, float] = {}
        self._shown: set[tuple[str, int, PlannedRun]] = set()

    @property
    def cancelled(self) -> bool:
        """Whether `lora-suite cancel` ended it."""
        return self._journal.cancelled

    @property
    def _site(self) -> Site:
        return self._submission.site

    def follow(self) -> dict[str, Done]:
        """Wait until every unit has come to its end."""
        done: dict[str, Done] = {}
        while True:
            jobs = self._look()
            if jobs is not None:
                for name, unit in self._units.items():
                    if name not in done and (ended := self._advance(unit, jobs)) is not None:
                        done[name] = ended
            if len(done) == len(self._units):
                return done
            time.sleep(self._site.poll_seconds)

    def _look(self) -> dict[str, Job] | None:
        """The queue, None while Slurm does not answer: its controller may be restarted under running jobs."""
        try:
            return jobs_of_user()
        except ConfigError as error:
            self._say("slurm", f"Slurm does not answer, waiting: {error}")
            return None

    def _advance(self, unit: Unit, jobs: dict[str, Job]) -> Done | None:
        """Do what is to be done for a unit now; returns its end, None while it has none."""
        state = self._journal.state(unit.name)
        if state.attempt == 0:
            if self.cancelled:
                return self._never(unit, state)
            self._submit(unit, 1)
            return None
        if state.job is None and not self._adopt(unit, state, jobs):
            return None
        assert state.job is not None
        outcome = Outcome.read(attempt_lines(self._results, unit.name, state.attempt))
        self._show(unit, state, outcome)
        job = jobs.get(state.job) or forgotten(state.job, state.name)
        if job.alive:
            place = f"on {job.nodes}" if job.nodes else f"waits: {job.reason}"
            self._say(unit.name, f"{unit.name}: job {job.id} {job.state} {place}")
            return None
        if job.state == "COMPLETED" and not outcome.finished and self._may_lag(job):
            return None
        self._say(unit.name, f"{unit.name}: job {job.id} ended, {job.state}")
        return self._conclude(unit, state, outcome, job)

    def _may_lag(self, job: Job) -> bool:
        """Whether what an orderly job wrote last may still be on its way through a shared file system."""
        since = self._ended.setdefault(job.id, time.monotonic())
        return time.monotonic() - since < _LAG_SECONDS

    def _conclude(self, unit: Unit, state: UnitState, outcome: Outcome, job: Job) -> Done | None:
        """Repeat or continue a unit whose job has ended, or settle it."""
        fault = fault_of(outcome, job)
        if fault and len(state.faults) < self._site.retries and not self.cancelled:
            self._say(f"{unit.name} again", f"{unit.name}: again, because {fault}")
            self._journal.lines.append(event="repeat", unit=unit.name, reason=f"repeated: {fault}")
            self._submit(unit, state.attempt + 1)
            return None
        if continues(self._results, unit, state, outcome, job) and not self.cancelled:
            self._say(f"{unit.name} next", f"{unit.name}: segment {state.segments + 1} of {unit.segments}")
            self._journal.lines.append(event="segment", unit=unit.name)
            self._submit(unit, state.attempt + 1)
            return None
        return settle(self._results, unit, state, outcome, job, self._site)

    def _submit(self, unit: Unit, attempt: int) -> None:
        """Submit a job, with a note before and after: what dies between the two leaves a name to look for."""
        folder = self._results / "jobs" / unit.name
        folder.mkdir(parents=True, exist_ok=True)
        name = f"lora-suite-{self._results.name}-{unit.name}.{attempt}"
        script = JobScript(
            name=name,
            resources=unit.resources(self._site),
            command=[
                *(sys.executable, "-m", "lora_suite.campaign.jobs.part"),
                *(str(self._results), unit.name, str(attempt)),
            ],
            environment=self._environment(),
            log=folder / f"{attempt}.log",
            folder=self._submission.snapshot.folder,
        )
        path = folder / f"{attempt}.sh"
        path.write_text(script.render(self._site), encoding="utf-8")
        with undisturbed():
            self._journal.lines.append(event="submitting", unit=unit.name, attempt=attempt, name=name)
            job = submit(self._site, path)
            self._journal.lines.append(event="submitted", unit=unit.name, attempt=attempt, job=job)

    def _environment(self) -> dict[str, str]:
        """What a job's environment needs so that it runs the code of the snapshot."""
        snapshot = self._submission.snapshot
        if not snapshot.is_program:
            return {}
        known = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(snapshot.folder), *([known] if known else [])])}

    def _adopt(self, unit: Unit, state: UnitState, jobs: dict[str, Job]) -> bool:
        """Find the job that a process was submitting when it died; submit it where there is none."""
        found = next((job for job in jobs.values() if job.name == state.name), None)
        written = attempt_lines(self._results, unit.name, state.attempt)
        number = found.id if found else next((e["job"] for e in written if e["event"] == "begin"), None)
        if number is None:
            self._submit(unit, state.attempt)
            return False
        self._journal.lines.append(event="submitted", unit=unit.name, attempt=state.attempt, job=number)
        state.job = number
        return True

    def _never(self, unit: Unit, state: UnitState) -> Done:
        """A unit that was cancelled before it was submitted."""
        job = Job("(none)", "", "CANCELLED")
        return settle(self._results, unit, state, Outcome(), job, self._site)

    def _show(self, unit: Unit, state: UnitState, outcome: Outcome) -> None:
        """Print a line for every run that has ended since the last look."""
        for planned, execution in outcome.executions.items():
            key = (unit.name, state.attempt, planned)
            if key in self._shown:
                continue
            self._shown.add(key)
            verdict = judge_execution(unit.part, planned, run_directory(self._results, planned), execution)
            first = verdict.message.partition("\n")[0]
            self._print(f"{verdict.state} {planned.case} {planned.repeat}{': ' if first else ''}{first}")

    def _say(self, about: str, line: str) -> None:
        """Print what is new about something."""
        if self._said.get(about) != line:
            self._said[about] = line
            self._print(line)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(Text(line), soft_wrap=True, highlight=False)


def _judge(
    plan: Plan,
    results: Path,
    submission: Submission,
    done: dict[str, Done],
    cancelled: bool,
    priors: Priors,
) -> SuiteVerdict:
    """Judge all runs and pairs of a plan by what its units came to."""
    executions: dict[PlannedRun, Execution] = {}
    carried: set[PlannedRun] = {run for run in plan.runs if plan.cases[run.case].gpus == 0}
    made = {}
    for unit in done.values():
        executions.update(unit.executions)
        carried.update(unit.part.runs)
        made.update({pair.name: pair for pair in unit.part.pairs})
    whole = replace(
        plan,
        runs=tuple(run for run in plan.runs if run in carried),
        pairs=tuple(made.get(pair.name, pair) for pair in plan.pairs),
    )
    runs, pairs = judge_suite(whole, results, executions, priors=priors)
    snapshot = submission.snapshot
    for check in (check for run in runs for check in run.checks):
        # Who reads the verdict looks into the tree that the snapshot was made of.
        check.source = check.source.replace(str(snapshot.folder), str(snapshot.source))
    seconds = (datetime.now(UTC) - submission.started).total_seconds()
    return SuiteVerdict(
        suite=plan.suite,
        started=submission.started.isoformat(timespec="seconds"),
        seconds=seconds,
        directory=str(results),
        interrupted=cancelled,
        runs=runs,
        pairs=pairs,
        command=submission.command,
    )


@contextlib.contextmanager
def _alone(results: Path) -> Iterator[None]:
    """Hold the lock of a results folder; raises ConfigError if another process does.

    Two that attended would both repeat a job.
    """
    with (results / _LOCK).open("w", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{results}: another process attends to these jobs already") from error
        yield
