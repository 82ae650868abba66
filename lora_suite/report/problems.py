# SPDX-License-Identifier: Apache-2.0
"""Everything in a verdict that is not PASS, as one list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from check_metrics import ExpressionError, parse
from check_metrics.series import describe_steps
from lora_suite.judge.verdict import RunVerdict, State, SuiteVerdict


@dataclass(frozen=True)
class Problem:
    """One thing that is not PASS: where, and why (several lines where a log's end is quoted)."""

    state: State
    place: str
    message: str


def problems(verdict: SuiteVerdict, *, brief: bool) -> list[Problem]:
    """The problems of runs, then of pairs, in the verdict's order; each non-PASS state leads to one or more.

    brief: a check that failed in several runs of a case is one problem, with the first run's message, and so
    are runs of a case that broke in the same way; pair checks go by their short names.
    """
    found = list(_run_problems(verdict))
    groups: dict[object, list[_RunProblem]] = {}
    for position, problem in enumerate(found):
        groups.setdefault(problem.group if brief else position, []).append(problem)
    return [*(_merged(group) for group in groups.values()), *_pair_problems(verdict, brief)]


def short_name(expression: str) -> str:
    """A pair check in few words: `lora/full step_time`, `train/loss max_rel_diff`; other forms in full."""
    try:
        form = parse(expression).pair
    except ExpressionError:
        return expression
    if form is None:
        return expression
    metrics = dict.fromkeys(name.removeprefix("timing/train/") for _, name in (form.left, form.right))
    if form.function == "ratio":
        return f"{form.left[0]}/{form.right[0]} {' '.join(metrics)}"
    return f"{' '.join(metrics)} {form.function}"


@dataclass(frozen=True)
class _RunProblem:
    """A problem of one run: `name` is the check's, empty for the run itself."""

    run: RunVerdict
    state: State
    name: str
    message: str

    @property
    def group(self) -> tuple[str, State, str]:
        """What problems of several repeats have in common; runs that broke differently have nothing."""
        return self.run.case, self.state, self.name or self.message.partition("\n")[0]


def _run_problems(verdict: SuiteVerdict) -> Iterator[_RunProblem]:
    for run in verdict.runs:
        if run.own_state != "PASS":
            yield _RunProblem(run, run.own_state, "", run.message)
        for check in run.checks:
            if check.state != "PASS":
                seen = f"{check.value}, " if check.value and check.kind == "check" else ""
                yield _RunProblem(run, check.state, check.name, f"{seen}{check.message}")


def _merged(group: Sequence[_RunProblem]) -> Problem:
    first = group[0]
    repeats = describe_steps(sorted({problem.run.repeat for problem in group}))
    name = f": {first.name}" if first.name else ""
    return Problem(first.state, f"{first.run.case} run {repeats}{name}", first.message)


def _pair_problems(verdict: SuiteVerdict, brief: bool) -> Iterator[Problem]:
    for pair in verdict.pairs:
        if pair.own_state != "PASS":
            yield Problem(pair.own_state, pair.name, pair.message)
        for check in pair.checks:
            if check.state != "PASS":
                name = short_name(check.expression) if brief else check.expression
                yield Problem(check.state, f"{pair.name}: {name}", check.message)
