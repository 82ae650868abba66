# SPDX-License-Identifier: Apache-2.0
"""Everything in a verdict that is not PASS, as one list."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from check_metrics.series import describe_steps
from lora_suite.judge.verdict import (
    CheckVerdict,
    PairCheckVerdict,
    PairVerdict,
    RunVerdict,
    State,
    SuiteVerdict,
)
from lora_suite.report.evidence import Evidence, of_pair_check, of_run_check, pair_form

_NO_SLUG = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True)
class Problem:
    """One thing that is not PASS: where, and why (several lines where a log's end is quoted).

    anchor: its place in the page. source: file:line of the limit, where known. owner: who answers
    for it, empty where nobody is named.
    """

    state: State
    place: str
    message: str
    anchor: str
    source: str = ""
    evidence: Evidence = field(default_factory=Evidence)
    owner: str = ""

    @property
    def title(self) -> str:
        """Its place, and whom to ask."""
        return f"{self.place} (owner {self.owner})" if self.owner else self.place


def problems(verdict: SuiteVerdict, *, brief: bool) -> list[Problem]:
    """What is wrong with pairs, then with runs, in the verdict's order; each non-PASS state leads to one or
    more.

    A pair that lacks runs comes after them: why they lack is said there.
    brief: a check that failed in several runs of a case is one problem, with the first run's message, and so
    are runs of a case that broke in the same way; pair checks go by their short names.
    """
    found = list(_run_problems(verdict))
    groups: dict[object, list[_RunProblem]] = {}
    for position, problem in enumerate(found):
        groups.setdefault(problem.group if brief else position, []).append(problem)
    of_runs = [_merged(verdict, group) for group in groups.values()]
    of_pairs = list(_pair_problems(verdict, brief))
    told = [each for each in of_pairs if each.state != "MISSING"]
    return [*told, *of_runs, *(each for each in of_pairs if each.state == "MISSING")]


def short_name(expression: str) -> str:
    """A pair check in few words: `lora/full step_time`, `train/loss max_rel_diff`; other forms in full.

    Which arm is over which stands there for every function that tells them apart.
    """
    form = pair_form(expression)
    if form is None:
        return expression
    metrics = dict.fromkeys(name.removeprefix("timing/train/") for _, name in (form.left, form.right))
    words = [*metrics, *([form.function] if form.function != "ratio" else [])]
    if form.function.endswith("ratio"):
        words.insert(0, f"{form.left[0]}/{form.right[0]}")
    return " ".join(words)


def health_flags(runs: Sequence[RunVerdict]) -> list[tuple[str, str]]:
    """What was wrong with the machine: each flag once a case, with the runs that had it."""
    flagged: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        for flag in run.health:
            flagged.setdefault((run.case, flag), []).append(run.repeat)
    return [
        (f"{case} run {describe_steps(sorted(set(repeats)))}", flag)
        for (case, flag), repeats in flagged.items()
    ]


def run_notes(runs: Sequence[RunVerdict]) -> list[tuple[str, str]]:
    """What else to know of runs: each note with the run that has it."""
    return [(f"{run.case} run {run.repeat}", note) for run in runs for note in run.notes]


def notes_of(verdict: SuiteVerdict, pair: PairVerdict) -> list[str]:
    """A pair's notes less those that only repeat the flags of its runs."""
    flags = {flag for run in verdict.runs if run.case in pair.arms.values() for flag in run.health}
    return [note for note in pair.notes if not any(note.endswith(f": {flag}") for flag in flags)]


def case_anchor(case: str) -> str:
    """Where a page shows a case: its runs, its checks, its history."""
    return _anchor("case", case)


def pair_anchor(pair: str) -> str:
    """Where a page shows a pair."""
    return _anchor("pair", pair)


def run_anchor(run: RunVerdict) -> str:
    """Where a page shows what became of one run."""
    return _anchor("run", run.case, str(run.repeat))


def check_anchor(place: str, check: str) -> str:
    """Where a page shows a check of a case (all its repeats) or of a pair."""
    return _anchor("check", place, check)


def _anchor(kind: str, *names: str) -> str:
    """A readable id that differs wherever the names do."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    words = _NO_SLUG.sub("-", " ".join(names).lower()).strip("-")[:60]
    return f"{kind}-{words}-{digest}"


@dataclass(frozen=True)
class _RunProblem:
    """A problem of one run: of the run itself, or of one of its checks."""

    run: RunVerdict
    state: State
    message: str
    check: CheckVerdict | None = None

    @property
    def group(self) -> tuple[str, State, str]:
        """What problems of several repeats have in common; runs that broke differently have nothing."""
        return self.run.case, self.state, self.check.name if self.check else self.message.partition("\n")[0]


def _run_problems(verdict: SuiteVerdict) -> Iterator[_RunProblem]:
    for run in verdict.runs:
        if run.own_state != "PASS":
            yield _RunProblem(run, run.own_state, run.message)
        for check in run.checks:
            if check.state != "PASS":
                seen = f"{check.value}, " if check.value and check.kind == "check" else ""
                yield _RunProblem(run, check.state, f"{seen}{check.message}", check)


def _merged(verdict: SuiteVerdict, group: Sequence[_RunProblem]) -> Problem:
    first = group[0]
    repeats = describe_steps(sorted({problem.run.repeat for problem in group}))
    place, case, check = f"{first.run.case} run {repeats}", first.run.case, first.check
    if check is None:
        return Problem(first.state, place, first.message, run_anchor(first.run), owner=first.run.owner)
    return Problem(
        first.state,
        f"{place}: {check.name}",
        first.message,
        check_anchor(case, check.name),
        check.source,
        of_run_check(verdict, case, check),
        first.run.owner,
    )


def _pair_problems(verdict: SuiteVerdict, brief: bool) -> Iterator[Problem]:
    for pair in verdict.pairs:
        if pair.own_state != "PASS":
            yield Problem(
                pair.own_state,
                pair.name,
                pair.message,
                pair_anchor(pair.name),
                pair.source,
                owner=pair.owner,
            )
        for check in pair.checks:
            if check.state != "PASS":
                yield _pair_problem(verdict, pair, check, brief)


def _pair_problem(verdict: SuiteVerdict, pair: PairVerdict, check: PairCheckVerdict, brief: bool) -> Problem:
    name = short_name(check.expression) if brief else check.expression
    return Problem(
        check.state,
        f"{pair.name}: {name}",
        check.message,
        check_anchor(pair.name, check.expression),
        check.source,
        of_pair_check(verdict, pair, check),
        pair.owner,
    )
