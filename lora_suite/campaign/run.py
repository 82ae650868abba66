# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run`: plan, run one after another, judge, print, write down."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.execute import BROKE, Launcher, Ration, Sharing, execute
from lora_suite.campaign.reference import against
from lora_suite.campaign.remember import Memory
from lora_suite.campaign.request import Request
from lora_suite.campaign.tracker import publish
from lora_suite.config.errors import ConfigError
from lora_suite.judge.environments import environment_facts
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.external import refuse_leftovers
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.processes import undisturbed
from lora_suite.launch.record import write_json_atomically
from lora_suite.launch.slurm.allocation import AllocationLauncher
from lora_suite.plan.check_lines import pair_check_lines
from lora_suite.plan.lint import Finding, blocking, lint_plan
from lora_suite.plan.model import Plan
from lora_suite.report import github, terminal
from lora_suite.report.formats import store

VERDICT = "verdict.json"


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
    request: Request,
    launcher: Launcher | None = None,
    console: Console | None = None,
    ration: Ration | None = None,
) -> Campaign:
    """Run a suite, print its verdict and store it. ration: is asked before every run.

    Raises ConfigError for whatever is found before anything runs: a plan that does not resolve, errors that
    lint finds in it (a budget that it exceeds among them), outputs that an external case is to make, no
    results folder.
    """
    console = console or PatientConsole()
    plan = request.plan()
    for warning in refuse_errors(plan):
        console.print(Text(str(warning)), soft_wrap=True)
    refuse_leftovers(plan)
    if launcher is None and request.queued(plan):
        from lora_suite.campaign.jobs.follow import run_jobs

        return run_jobs(request, plan, console)
    kind = AllocationLauncher if request.inside_allocation else LocalLauncher
    with against(request, plan) as (plan, checkouts):
        launcher = launcher or kind(checkouts)
        results = results_folder(request.results, plan.suite)
        memory = Memory.of(request.history)
        priors, unknown = memory.priors(plan)
        verdict = execute(
            plan,
            results,
            launcher,
            console,
            keep=request.keep,
            priors=priors,
            sharing=sharing(launcher, request.slots),
            ration=ration,
        )
    verdict.command = request.command
    return conclude(Campaign(plan, verdict, verdict.exit_code), request.suite, memory, unknown, console)


def conclude(campaign: Campaign, suite: Path, memory: Memory, unknown: str, console: Console) -> Campaign:
    """Store and print the verdict of a suite that has ended.

    suite: the file as it is to be named. unknown: why its pairs had no priors, empty where they had.
    """
    verdict, results = campaign.verdict, Path(campaign.verdict.directory)
    verdict.environments = environment_facts(verdict.runs)
    _point_at_checks(verdict, suite)
    # The history reads the stored verdict, and gives what the reports show of earlier nights.
    unstored, forgotten = _store(verdict, results), ""
    if not unstored:
        with undisturbed():
            verdict, forgotten = memory.take(verdict, results)
        unstored = _store(verdict, results, reports=True)
    # Nobody may be watching any more (a closed pipe, a lost terminal): the verdict counts all the same.
    with contextlib.suppress(OSError):
        terminal.render(verdict, console)
        github.annotate(verdict)
        for problem in filter(None, (unknown, forgotten)):
            console.print(Text(problem), soft_wrap=True)
        if unstored:
            console.print(Text(f"error: {unstored}; the verdict above is not stored"), soft_wrap=True)
    publish(campaign.plan, verdict)
    exit_code = max(verdict.exit_code, BROKE) if unstored else verdict.exit_code
    return Campaign(campaign.plan, verdict, exit_code)


def sharing(launcher: Launcher, slots: int) -> Sharing | None:
    """How cases outside pairs share this machine; None where they do not."""
    if slots == 1 or not isinstance(launcher, LocalLauncher):
        return None
    return Sharing(slots, launcher.devices(), launcher.on)


def refuse_errors(plan: Plan) -> list[Finding]:
    """Lint a plan: raise ConfigError with the errors that forbid to run it, return the warnings."""
    findings = lint_plan(plan)
    errors = blocking(findings)
    if errors:
        raise ConfigError("nothing runs, because of\n" + "\n".join(str(each) for each in errors))
    return [each for each in findings if each.severity == "warning"]


def _point_at_checks(verdict: SuiteVerdict, suite: Path) -> None:
    """Say of each pair and its checks where the suite states them."""
    lines = pair_check_lines(suite)
    for pair in verdict.pairs:
        own = lines.get((pair.name, ""))
        pair.source = f"{suite}:{own}" if own else ""
        for check in pair.checks:
            line = lines.get((pair.name, check.expression.strip()), own)
            check.source = f"{suite}:{line}" if line else ""


def _store(verdict: SuiteVerdict, results: Path, *, reports: bool = False) -> str | None:
    """Write the verdict, with its reports where they are wanted; return why that failed, if it did."""
    try:
        with undisturbed():
            write_json_atomically(results / VERDICT, verdict.model_dump(mode="json"))
            if reports:
                store(verdict, results)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def results_folder(root: Path, suite: str) -> Path:
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
