# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run`: plan, run one after another, judge, print, write down."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.conclude import Campaign, PatientConsole, conclude, results_folder
from lora_suite.campaign.execute import Launcher, Ration, Sharing, execute
from lora_suite.campaign.jobs.follow import run_jobs
from lora_suite.campaign.reference import against
from lora_suite.campaign.remember import Memory
from lora_suite.campaign.request import Request
from lora_suite.config.errors import ConfigError
from lora_suite.launch.external import refuse_leftovers
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.slurm.allocation import AllocationLauncher
from lora_suite.plan.lint import Finding, blocking, lint_plan
from lora_suite.plan.model import Plan


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
