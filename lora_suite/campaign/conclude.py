# SPDX-License-Identifier: Apache-2.0
"""How a run of a suite ends, whoever ran it: where results lie; the verdict printed, stored, remembered."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.execute import BROKE
from lora_suite.campaign.remember import Memory
from lora_suite.campaign.tracker import publish
from lora_suite.config.errors import ConfigError
from lora_suite.judge.environments import environment_facts
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.launch.processes import undisturbed
from lora_suite.launch.record import write_json_atomically
from lora_suite.plan.check_lines import pair_check_lines
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
