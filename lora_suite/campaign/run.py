# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run`: plan, run one after another, judge, print, write down."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.live import LiveView
from lora_suite.config.errors import ConfigError
from lora_suite.judge.suite import Execution, judge_execution, judge_suite, run_directory
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.external import refuse_leftovers
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.processes import stop_signals_interrupt, undisturbed
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended, write_json_atomically
from lora_suite.plan.lint import Finding, blocking, lint_plan
from lora_suite.plan.load import load_plan
from lora_suite.plan.model import Case, ExternalCase, Plan, PlannedRun, UnreadableCase
from lora_suite.report import junit, terminal

VERDICT = "verdict.json"
JUNIT = "junit.xml"
_BROKE = 3


@dataclass(frozen=True)
class Request:
    """What the command line asks for; see `load_plan` for the parts that shape the plan.

    results: folder that gets a new folder for this run of the suite. keep: checkpoints stay.
    """

    suite: Path
    overrides: tuple[str, ...] = ()
    arm_overrides: tuple[str, ...] = ()
    select: str | None = None
    repeats: int | None = None
    results: Path = Path("results")
    keep: bool = False

    def plan(self) -> Plan:
        """Resolve the suite; raises ConfigError."""
        return load_plan(
            self.suite,
            select=self.select,
            repeats=self.repeats,
            arm_overrides=self.arm_overrides,
            overrides=self.overrides,
        )


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


class PatientConsole(Console):
    """A console that falls silent where its reader goes away, in place of ending the program."""

    def on_broken_pipe(self) -> None:
        """Print nothing any more: the suite goes on, and its verdict is stored."""
        self.quiet = True


@dataclass(frozen=True)
class Campaign:
    """A suite that was run. exit_code: the verdict's, or that it could not be stored."""

    plan: Plan
    verdict: SuiteVerdict
    exit_code: int


def run_suite(request: Request, launcher: Launcher | None = None, console: Console | None = None) -> int:
    """`run_campaign`, of which only the exit code counts."""
    return run_campaign(request, launcher, console).exit_code


def run_campaign(
    request: Request, launcher: Launcher | None = None, console: Console | None = None
) -> Campaign:
    """Run a suite, print its verdict and store it.

    Raises ConfigError for whatever is found before anything runs: a plan that does not resolve, errors that
    lint finds in it (a budget that it exceeds among them), outputs that an external case is to make, no
    results folder.
    """
    console = console or PatientConsole()
    plan = request.plan()
    for warning in refuse_errors(plan):
        console.print(Text(str(warning)), soft_wrap=True)
    refuse_leftovers(plan)
    results = _results_folder(request.results, plan.suite)
    verdict = execute(plan, results, launcher or LocalLauncher(), console, keep=request.keep)
    unstored = _store(verdict, results)
    # Nobody may be watching any more (a closed pipe, a lost terminal): the verdict counts all the same.
    with contextlib.suppress(OSError):
        terminal.render(verdict, console)
        if unstored:
            console.print(Text(f"error: {unstored}; the verdict above is not stored"), soft_wrap=True)
    exit_code = max(verdict.exit_code, _BROKE) if unstored else verdict.exit_code
    return Campaign(plan, verdict, exit_code)


def execute(plan: Plan, results: Path, launcher: Launcher, console: Console, *, keep: bool) -> SuiteVerdict:
    """Run everything that is planned, one after another, and judge it.

    A run that breaks stops no other. An interrupt stops the suite: what was measured is judged, the rest is
    MISSING.
    """
    started = datetime.now(UTC)
    clock = time.monotonic()
    executions: dict[PlannedRun, Execution] = {}
    interrupted = False
    with LiveView(console, len(plan.runs)) as view:
        try:
            with stop_signals_interrupt():
                for planned in plan.runs:
                    interrupted = _run(plan, planned, results, launcher, view, executions, keep=keep)
                    if interrupted:
                        break
        except KeyboardInterrupt:
            interrupted = True
    with undisturbed():
        runs, pairs = judge_suite(plan, results, executions)
    return SuiteVerdict(
        suite=plan.suite,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        directory=str(results),
        interrupted=interrupted,
        runs=runs,
        pairs=pairs,
    )


def refuse_errors(plan: Plan) -> list[Finding]:
    """Lint a plan: raise ConfigError with the errors that forbid to run it, return the warnings."""
    findings = lint_plan(plan)
    errors = blocking(findings)
    if errors:
        raise ConfigError("nothing runs, because of\n" + "\n".join(str(each) for each in errors))
    return [each for each in findings if each.severity == "warning"]


def _run(
    plan: Plan,
    planned: PlannedRun,
    results: Path,
    launcher: Launcher,
    view: LiveView,
    executions: dict[PlannedRun, Execution],
    *,
    keep: bool,
) -> bool:
    """Execute one run, note it down and show it; return whether the suite was interrupted."""
    case = plan.cases[planned.case]
    run_dir = run_directory(results, planned)
    view.begin(planned, case)
    if isinstance(case, UnreadableCase):
        view.end(judge_execution(plan, planned, run_dir, None))
        return False
    launched = datetime.now(UTC)
    clock = time.monotonic()
    try:
        # A folder that is there already holds another run's files.
        run_dir.mkdir(parents=True)
        ended = launcher.run(case, planned, run_dir, keep=keep, poll=view.look)
    except KeyboardInterrupt:
        ended = Ended(how="interrupted", status=130, message="interrupted")
    except OSError as error:
        ended = Ended(how="failed", status=_BROKE, message=f"{error.filename}: {error.strerror}")
    executions[planned] = Execution(ended, launched, time.monotonic() - clock)
    view.end(judge_execution(plan, planned, run_dir, executions[planned]))
    return ended.how == "interrupted"


def _store(verdict: SuiteVerdict, results: Path) -> str | None:
    """Write the verdict and its JUnit form; return why that failed, if it did."""
    try:
        with undisturbed():
            write_json_atomically(results / VERDICT, verdict.model_dump(mode="json"))
            (results / JUNIT).write_text(junit.render(verdict), encoding="utf-8")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def _results_folder(root: Path, suite: str) -> Path:
    """Create the folder of this run of the suite: a new one, named by time and chance."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = root / suite / f"{stamp}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; choose another folder with --results"
        ) from error
    return folder
