# SPDX-License-Identifier: Apache-2.0
"""Rules about one check: can it be read, does it ask for something that will be there, can it fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from check_metrics import Expression, ExpressionError, parse
from check_metrics.syntax import Call, Compare, Constant, Node, SeriesRef, StepValue, walk
from lora_suite.config.nearest import nearest
from lora_suite.config.schema import Recipe
from lora_suite.plan.lint.finding import Finding, error, warning
from lora_suite.plan.lint.sensitivity import can_fail
from lora_suite.plan.metric_names import CATALOG, STEP_TIME, TOTAL_STEP_TIME, VALIDATION_LOSS, known

STARTUP_MINUTES = 2.0
_STEP_TIMES = (STEP_TIME, TOTAL_STEP_TIME)
# Counted, not measured: an exact limit is meant.
_EXACT = ("lora/*", "train/global_valid_toks")


@dataclass(frozen=True)
class Subject:
    """A check and what it is about.

    arms: names that it may read. recipes: of the runs that it reads; empty where another trainer makes one of
    them, of whose metrics nothing is known. steps: the last step that all of them reach.
    """

    expression: str
    file: Path
    line: int
    arms: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    steps: int


def lint_check(subject: Subject) -> Iterator[Finding]:
    """Yield what is wrong with a check."""
    try:
        expression = parse(subject.expression)
    except ExpressionError as caught:
        yield error(subject.file, subject.line, "unparsable-check", str(caught))
        return
    problems = [
        *_unknown_arms(subject, expression),
        *_unknown_metrics(subject, expression),
        *_unreachable_steps(subject, expression),
    ]
    yield from problems
    if problems:
        return
    if not can_fail(expression, subject.steps):
        yield error(
            subject.file,
            subject.line,
            "cannot-fail",
            f"{subject.expression}: no value that these metrics can have fails this check; it guards nothing",
        )
    yield from _exact_limits(subject, expression)


def step_time_limit(text: str) -> float | None:
    """The largest step time in seconds that a check allows; None if it limits no step time."""
    try:
        expression = parse(text)
    except ExpressionError:
        return None
    limits = []
    for node in walk(expression.tree):
        if isinstance(node, Compare):
            left, right = (node.left, node.right) if node.op[0] == "<" else (node.right, node.left)
            if node.op[0] in "<>" and isinstance(right, Constant) and _reads(left, _is_step_time):
                limits.append(right.value)
    return max(limits, default=None)


def _unknown_arms(subject: Subject, expression: Expression) -> Iterator[Finding]:
    """Names that are no arm here."""
    for arm in sorted(expression.arms.difference(subject.arms)):
        text = f"{subject.expression}: there is no arm {arm}; there are {', '.join(subject.arms)}"
        yield error(subject.file, subject.line, "unknown-arm", text)


def _unknown_metrics(subject: Subject, expression: Expression) -> Iterator[Finding]:
    """Metrics that no run of ours writes."""
    if not subject.recipes:
        return
    for metric in sorted({metric for _, metric in expression.metrics}):
        if known(metric) is not None or any(fnmatchcase(name, metric) for name in _sample_names()):
            continue
        close = nearest(metric, _sample_names())
        hint = f"; did you mean {close[0]}?" if close else ""
        text = f"{subject.expression}: no run writes a metric {metric}{hint}"
        yield error(subject.file, subject.line, "unknown-metric", text)


def _unreachable_steps(subject: Subject, expression: Expression) -> Iterator[Finding]:
    """Steps that no run will have."""
    place = (subject.file, subject.line, "unreachable-step")
    if expression.max_step > subject.steps:
        text = f"{subject.expression}: asks for step {expression.max_step}, but the run has {subject.steps}"
        yield error(*place, text)
        return
    for _, metric, step in sorted(expression.steps) if subject.recipes else ():
        if metric == VALIDATION_LOSS and not any(_validates(recipe, step) for recipe in subject.recipes):
            period = subject.recipes[0].sft.val_period
            text = f"{subject.expression}: there is no validation at step {step} (sft.val_period is {period})"
            yield error(*place, text)


def _exact_limits(subject: Subject, expression: Expression) -> Iterator[Finding]:
    """Measured values that must equal a number."""
    for node in walk(expression.tree):
        if isinstance(node, Compare) and node.op in ("==", "!=") and _reads(node, _is_measured):
            text = (
                f"{subject.expression}: {node.op} leaves a measured value no margin; give a limit with < or >"
            )
            yield warning(subject.file, subject.line, "no-margin", text)


def _validates(recipe: Recipe, step: int) -> bool:
    """Whether a run validates at this step (0: before the first)."""
    sft = recipe.sft
    if step == 0:
        return sft.val_at_start
    periodic = sft.val_period > 0 and step % sft.val_period == 0
    return periodic or (sft.val_at_end and step == sft.max_num_steps)


def _reads(node: Node, condition: Callable[[SeriesRef], bool]) -> bool:
    """Whether a series that fulfils the condition takes part in a node by its values, not by its length."""
    for below in walk(node):
        if isinstance(below, StepValue) and condition(below.series):
            return True
        if isinstance(below, Call) and below.function != "count" and any(map(condition, below.series)):
            return True
    return False


def _is_step_time(series: SeriesRef) -> bool:
    return series.metric in _STEP_TIMES


def _is_measured(series: SeriesRef) -> bool:
    return not any(fnmatchcase(series.metric, pattern) for pattern in _EXACT)


def _sample_names() -> Collection[str]:
    """The catalogue's names, with 0 for every index."""
    return [
        ".".join("0" if part in ("N", "M") else part for part in entry.name.split(".")) for entry in CATALOG
    ]
