# SPDX-License-Identifier: Apache-2.0
"""Rules about a suite: its plan, its pairs, its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from check_metrics import ExpressionError, parse
from lora_suite.config.errors import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.plan.equal_steps import needs_equal_steps
from lora_suite.plan.lint.expressions import Subject, lint_check
from lora_suite.plan.lint.finding import INCOMPARABLE_ARMS, Finding, error, from_config_error
from lora_suite.plan.model import AnyCase, Case, Pair, Plan, UnreadableCase

UNREADABLE, EQUAL_STEPS = "unreadable", "equal-steps"


def lint_pairs_and_budget(plan: Plan) -> Iterator[Finding]:
    """Yield what is wrong with a plan beyond its cases' own files."""
    for case in plan.cases.values():
        if isinstance(case, UnreadableCase):
            found = from_config_error(ConfigError(case.problem), plan.path, UNREADABLE)
            yield from (replace(each, severity="warning", rule=UNREADABLE) for each in found)
        yield from _lint_extra_checks(plan, case)
    for pair in plan.pairs:
        yield from _lint_pair(plan, pair)
    if plan.budget_gpu_hours is not None and plan.gpu_hours > plan.budget_gpu_hours:
        message = (
            f"the plan may cost {plan.gpu_hours:g} GPU-hours, over its budget of {plan.budget_gpu_hours:g}"
        )
        yield error(plan.path, 0, "budget", message)


def _recipes(cases: Sequence[AnyCase]) -> tuple[Recipe, ...]:
    """The recipes of the cases if all of them are ours, else none: then nothing is known of their metrics."""
    recipes = tuple(case.recipe for case in cases if isinstance(case, Case))
    return recipes if len(recipes) == len(cases) else ()


def _lint_extra_checks(plan: Plan, case: AnyCase) -> Iterator[Finding]:
    """Checks that the suite adds to a driver's."""
    for check in case.checks:
        if check.file == plan.path:
            recipes = _recipes([case])
            yield from lint_check(
                Subject(check.expression, plan.path, check.line, ("data",), recipes, case.steps)
            )


def _lint_pair(plan: Plan, pair: Pair) -> Iterator[Finding]:
    """A pair's checks, and whether its arms are as comparable as the suite says."""
    cases = [plan.cases[stem] for stem in pair.arms.values()]
    readable = not any(isinstance(case, UnreadableCase) for case in cases)
    if readable:
        steps = min(case.steps for case in cases)
        for check in pair.checks:
            yield from lint_check(Subject(check, plan.path, 0, tuple(pair.arms), _recipes(cases), steps))
            if pair.different_batches and _compares_steps(check):
                message = (
                    f"pair {pair.name}: {check}: compares equal steps, but the arms see different batches; "
                    f"compare whole runs by ratio(…) < limit, or leave batches: different out"
                )
                yield error(plan.path, 0, EQUAL_STEPS, message)
    if not pair.comparable:
        if readable and not pair.not_comparable:
            message = f"pair {pair.name}: comparable is false, but its arms differ in nothing; leave it out"
            yield error(plan.path, 0, INCOMPARABLE_ARMS, message)
        return
    for found in pair.not_comparable:
        message = (
            f"pair {pair.name}: the arms differ in {found.key}: {found.left!r} and {found.right!r}; "
            f"make them equal, or list the key under allow"
        )
        yield error(plan.path, 0, INCOMPARABLE_ARMS, message)


def _compares_steps(check: str) -> bool:
    """Whether a check compares equal steps; one that cannot be read is another rule's."""
    try:
        return needs_equal_steps(parse(check))
    except ExpressionError:
        return False
