# SPDX-License-Identifier: Apache-2.0
"""What `lora-suite bisect` does from its options to its exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_suite.campaign.bisect import Search, bisect
from lora_suite.campaign.conclude import PatientConsole, results_folder
from lora_suite.campaign.probe import Launchers, PairProbe, Subject
from lora_suite.campaign.repository import Commit, Repository
from lora_suite.judge.verdict import EXIT_CODES
from lora_suite.launch.local import LocalLauncher


@dataclass(frozen=True)
class BisectRequest:
    """What the command line asks for. select: must choose one pair. budget_minutes: of all probes."""

    suite: Path
    good: str
    bad: str
    select: str | None
    budget_minutes: float | None
    results: Path


def run_bisect(
    request: BisectRequest, launchers: Launchers = LocalLauncher, console: Console | None = None
) -> int:
    """Search, print each probe and what was found; return 0 if that is one commit, else 5.

    Raises ConfigError for a pair, a repository or commits that cannot be searched, and KeyboardInterrupt.
    """
    console = console or PatientConsole()
    subject = Subject.of(request.suite, request.select)
    repository = Repository(subject.folder)
    good, bad = repository.commit(request.good), repository.commit(request.bad)
    commits = repository.between(good, bad)

    def tell(line: str) -> None:
        console.print(Text(line), soft_wrap=True, highlight=False)

    tell(f"{len(commits)} commits, {subject.metric} of arm {subject.arm}, against {good}")
    results = results_folder(request.results, f"bisect-{request.suite.stem}")
    with PairProbe(subject, repository, good, results, console, request.budget_minutes, launchers) as probe:
        search = bisect(good, commits, probe, tell)
    for line in _conclusion(search):
        tell(line)
    tell(f"results: {results}")
    return 0 if search.found is not None else EXIT_CODES["INCONCLUSIVE"]


def _conclusion(search: Search) -> Iterator[str]:
    if search.problem:
        yield f"cannot be searched: {search.problem}"
    elif search.found is not None:
        yield f"first bad commit: {search.found}"
    else:
        yield f"the first bad commit is one of these {len(search.range)}:"
        for commit in search.range:
            yield f"  {commit}: {_why(search, commit)}"


def _why(search: Search, commit: Commit) -> str:
    answer = search.answers.get(commit)
    return "not probed" if answer is None else f"{answer.state}, {answer.message}"
