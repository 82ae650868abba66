# SPDX-License-Identifier: Apache-2.0
"""`lora-suite nightly`: suites in order, within a window and a cost, and one summary of the night."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.conclude import PatientConsole
from lora_suite.campaign.execute import Launcher
from lora_suite.campaign.folders import NIGHT, alone, new_folder, remove_outdated
from lora_suite.campaign.notify import notify
from lora_suite.campaign.ration import NightRation
from lora_suite.campaign.request import Request
from lora_suite.campaign.run import refuse_errors, run_campaign
from lora_suite.config.errors import ConfigError
from lora_suite.judge.night import INTERRUPTED, MISSING, USAGE, NightVerdict, SuiteOutcome
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.processes import undisturbed
from lora_suite.launch.record import write_json_atomically
from lora_suite.plan.nightly_file import NightlyFile, SuiteEntry, read_nightly
from lora_suite.report import night as report
from lora_suite.report.problems import problems
from lora_suite.report.words import outcome

SUMMARY = "summary.md"
_PROBLEMS = 10
Clock = Callable[[], datetime]


def local_now() -> datetime:
    """This moment in this machine's zone."""
    return datetime.now().astimezone()


@dataclass(frozen=True)
class Job:
    """A nightly job: its file, read, and where its paths lead."""

    path: Path
    file: NightlyFile

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job; raises ConfigError."""
        return cls(path, read_nightly(path))

    @property
    def results(self) -> Path:
        """The folder of all nights."""
        return self._place(self.file.results)

    @property
    def history(self) -> Path:
        """The store that the runs are recorded to."""
        return self._place(self.file.history) if self.file.history else self.results / "history.db"

    def request(self, entry: SuiteEntry, results: Path) -> Request:
        """What `lora-suite run` would be asked for."""
        return Request(
            suite=self._place(entry.suite),
            overrides=tuple(entry.overrides),
            select=entry.select,
            tiers=entry.tier,
            repeats=entry.repeats,
            budget_minutes=entry.budget_minutes,
            slots=entry.slots,
            launcher=self.file.launcher,
            site=self._place(self.file.site) if self.file.site else None,
            results=results,
            history=self.history,
        )

    def _place(self, path: str) -> Path:
        """Where a path of the file leads, without the `..` that a verdict would repeat everywhere."""
        return Path(os.path.normpath(self.path.parent / path))


def preview_night(path: Path, console: Console, clock: Clock = local_now) -> int:
    """Print what a night would run, its minutes and GPU-hours at most; run nothing. Returns 0 or 2."""
    job = Job.read(path)
    minutes = hours = 0.0
    code = 0
    for entry in job.file.suites:
        try:
            plan = job.request(entry, job.results).plan()
            refuse_errors(plan)
        except ConfigError as error:
            _say(console, f"{entry.title}: cannot run: {error}")
            code = USAGE
            continue
        cost = f"at most {plan.minutes:g} minutes and {plan.gpu_hours:.4g} GPU-hours"
        _say(console, f"{entry.title}: {len(plan.runs)} runs, {len(plan.pairs)} pairs, {cost}")
        minutes, hours = minutes + plan.minutes, hours + plan.gpu_hours
    _say(console, f"in all at most {minutes:g} minutes and {hours:.4g} GPU-hours")
    window = job.file.window
    if window is not None:
        closes = window.closes(clock())
        now = "closed now" if closes is None else f"open now, until {closes:%H:%M}"
        _say(console, f"window: {window.begin} to {window.end}, {now}; what does not fit is MISSING")
    if job.file.gpu_hours is not None:
        _say(console, f"cap: {job.file.gpu_hours:g} GPU-hours; what does not fit is MISSING")
    return code


def run_night(
    path: Path, launcher: Launcher | None = None, console: Console | None = None, clock: Clock = local_now
) -> int:
    """Run a nightly job and return its exit code, the worst of its suites'.

    A suite that cannot be planned stops no other. Raises ConfigError for a job's file that cannot be read,
    and where another job is at work in the same folder.
    """
    console = console or PatientConsole()
    job = Job.read(path)
    with alone(job.results):
        night = _Night(job, new_folder(job.results, clock()), launcher, console, clock)
        verdict = night.run()
        with undisturbed():
            return night.close(verdict)


class _Night:
    """One night of a job."""

    def __init__(
        self, job: Job, folder: Path, launcher: Launcher | None, console: Console, clock: Clock
    ) -> None:
        self._job, self._folder, self._launcher = job, folder, launcher
        self._console, self._clock = console, clock
        self._began = clock()
        window = job.file.window
        self._deadline = window.closes(self._began) if window is not None else None
        self._closed = window is not None and self._deadline is None
        self._ration = NightRation(self._deadline, job.file.gpu_hours, clock)

    def run(self) -> NightVerdict:
        """Run the suites; after an interrupt none that is left."""
        started = time.monotonic()
        outcomes: list[SuiteOutcome] = []
        for entry in self._job.file.suites:
            outcomes.append(self._outcome(entry, stopped=any(o.exit_code == INTERRUPTED for o in outcomes)))
        return NightVerdict(
            started=self._began.isoformat(timespec="seconds"),
            seconds=time.monotonic() - started,
            host=socket.gethostname(),
            directory=str(self._folder),
            gpu_hours=self._ration.used,
            suites=outcomes,
        )

    def close(self, night: NightVerdict) -> int:
        """Write the summary, remove older nights, tell the webhook, print; return the exit code."""
        self._write(night)
        night.notes = remove_outdated(self._job.results, self._job.file.keep, self._began, self._job.history)
        if self._job.file.webhook is not None:
            untold = notify(night, self._job.file.webhook, os.environ)
            night.notes += [untold] if untold else []
        unwritten = self._write(night)
        for line in report.lines(night):
            _say(self._console, line)
        if unwritten:
            _say(self._console, f"error: {unwritten}; the summary above is not stored")
        return night.exit_code

    def _write(self, night: NightVerdict) -> str:
        """Write night.json and the summary; return why that failed, if it did."""
        try:
            write_json_atomically(self._folder / NIGHT, night.model_dump(mode="json"))
            (self._folder / SUMMARY).write_text(report.markdown(night), encoding="utf-8")
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def _outcome(self, entry: SuiteEntry, *, stopped: bool) -> SuiteOutcome:
        """Run one suite, unless nothing may begin any more."""
        reason = "the night was interrupted" if stopped else self._over()
        if reason:
            return _absent(entry, MISSING, reason)
        used, clock = self._ration.used, time.monotonic()
        try:
            request = self._job.request(entry, self._folder)
            campaign = run_campaign(request, self._launcher, self._console, self._ration)
        except ConfigError as error:
            return _absent(entry, USAGE, str(error))
        except KeyboardInterrupt:
            return _absent(entry, INTERRUPTED, "interrupted before anything ran")
        verdict = campaign.verdict
        if request.queued(campaign.plan):
            # Jobs of a cluster are begun by its scheduler, which asks nobody: what they took is booked here.
            for run in verdict.runs:
                self._ration.book(campaign.plan.cases[run.case], run.seconds or 0.0)
        return SuiteOutcome(
            name=entry.title,
            suite=entry.suite,
            exit_code=campaign.exit_code,
            outcome=outcome(verdict),
            message=self._ration.cut if _lacks_runs(verdict) else "",
            directory=str(Path(verdict.directory).relative_to(self._folder)),
            seconds=time.monotonic() - clock,
            gpu_hours=self._ration.used - used,
            counts={state: verdict.states.count(state) for state in dict.fromkeys(verdict.states)},
            problems=_problems(verdict),
        )

    def _over(self) -> str:
        """Why no suite may begin any more, empty where one may."""
        window = self._job.file.window
        if window is not None and (self._closed or (self._deadline and self._clock() >= self._deadline)):
            return f"the window from {window.begin} to {window.end} was closed"
        cap = self._job.file.gpu_hours
        return f"the night's {cap:g} GPU-hours were used" if cap and self._ration.used >= cap else ""


def _absent(entry: SuiteEntry, code: int, message: str) -> SuiteOutcome:
    """A suite of which there is no verdict."""
    words = {MISSING: "MISSING", USAGE: "UNUSABLE", INTERRUPTED: "INTERRUPTED"}
    return SuiteOutcome(
        name=entry.title, suite=entry.suite, exit_code=code, outcome=words[code], message=message
    )


def _lacks_runs(verdict: SuiteVerdict) -> bool:
    return any(run.state == "MISSING" for run in verdict.runs)


def _problems(verdict: SuiteVerdict) -> list[str]:
    found = problems(verdict, brief=True)
    told = [f"{each.state} {each.title}: {each.message.partition(chr(10))[0]}" for each in found[:_PROBLEMS]]
    return [*told, *([f"and {len(found) - len(told)} more"] if len(found) > len(told) else [])]


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True, highlight=False)
