# SPDX-License-Identifier: Apache-2.0
"""`lora-suite run --launcher slurm`, `attach` and `cancel`, from their options to the exit code."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.conclude import VERDICT, Campaign, PatientConsole, conclude, results_folder
from lora_suite.campaign.jobs.attend import attend, cancel_jobs, prepare
from lora_suite.campaign.jobs.journal import Submission
from lora_suite.campaign.reference import against
from lora_suite.campaign.remember import Memory
from lora_suite.campaign.request import Request
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.plan.model import Plan
from lora_suite.report import terminal


def run_jobs(request: Request, plan: Plan, console: Console) -> Campaign:
    """Submit the jobs of a suite and follow them; raises ConfigError before anything is submitted."""
    with against(request, plan) as (whole, _):
        results = prepare(request, plan, whole, lambda: results_folder(request.results, plan.suite))
    _tell(console, f"results: {results}")
    return _follow(results, console)


def attach(results: Path, console: Console | None = None) -> int:
    """Follow the jobs of a results folder again; already judged, print that. Returns the exit code."""
    console = console or PatientConsole()
    Submission.read(results)
    if (results / VERDICT).is_file():
        verdict = SuiteVerdict.model_validate_json((results / VERDICT).read_text(encoding="utf-8"))
        terminal.render(verdict, console)
        return verdict.exit_code
    return _follow(results, console).exit_code


def cancel(results: Path, console: Console | None = None) -> int:
    """End the jobs of a results folder and no others; 0."""
    console = console or PatientConsole()
    for job in cancel_jobs(results):
        _tell(console, f"cancelled: job {job.id}, {job.name}")
    _tell(console, f"`lora-suite attach {results}` judges what was measured")
    return 0


def _follow(results: Path, console: Console) -> Campaign:
    try:
        attended = attend(results, console)
    except KeyboardInterrupt:
        _tell(console, f"the jobs go on: lora-suite attach {results}, or lora-suite cancel {results}")
        raise
    verdict, memory = attended.verdict, Memory.of(attended.submission.request.history)
    campaign = Campaign(attended.plan, verdict, verdict.exit_code)
    campaign = conclude(campaign, attended.submission.suite, memory, attended.unknown, console)
    if (results / VERDICT).is_file():
        attended.tidy()
    return campaign


def _tell(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True, highlight=False)
