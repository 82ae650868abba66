# SPDX-License-Identifier: Apache-2.0
"""Rules about a script's checks: can they be read, reached, failed, and met within the wall-clock limit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from check_metrics import Expression, ExpressionError, parse
from lora_suite.plan.audit.finding import AuditFinding
from lora_suite.plan.audit.repository import Repository
from lora_suite.plan.external.script import Script, ScriptCheck
from lora_suite.plan.lint.expressions import STARTUP_MINUTES, step_time_limit
from lora_suite.plan.lint.sensitivity import can_fail

# What a run is taken to have where its script does not say.
_STEPS = 50


def lint_checks(repository: Repository, script: Script) -> Iterator[AuditFinding]:
    """Yield what is wrong with the checks of a script.

    A check in which a shell variable is left that is not known is not judged.
    """
    file = repository.shown(script.path)
    for check in script.checks:
        if "$" not in check.expression:
            for kind, message in _problems(script, check):
                yield AuditFinding(kind, file, check.line, check.expression, message)


def _problems(script: Script, check: ScriptCheck) -> Iterator[tuple[str, str]]:
    try:
        expression = parse(check.expression)
    except ExpressionError as error:
        yield "unparsable-check", f"{check.expression}: {str(error).splitlines()[0]}"
        return
    steps = script.config.max_steps
    if steps is not None and expression.max_step > steps:
        yield "unreachable-step", f"{check.expression}: asks for step {expression.max_step} of {steps}"
    elif not _can_fail(expression, steps or _STEPS):
        yield "cannot-fail", f"{check.expression}: holds for every run"
    yield from _minutes(script, check)


@lru_cache(maxsize=4096)
def _can_fail(expression: Expression, steps: int) -> bool:
    """`can_fail`, once for the many scripts that have the same check."""
    return can_fail(expression, steps)


def _minutes(script: Script, check: ScriptCheck) -> Iterator[tuple[str, str]]:
    """A run that keeps to its step time must be able to end."""
    config = script.config
    limit = step_time_limit(check.expression)
    if limit is None or config.max_steps is None or config.minutes is None:
        return
    steps = min(config.steps_per_run or config.max_steps, config.max_steps)
    needed = steps * limit / 60.0 + STARTUP_MINUTES
    if needed > config.minutes:
        yield (
            "minutes",
            f"NUM_MINUTES={config.minutes:g}, but {steps} steps of up to {limit:g} s and "
            f"{STARTUP_MINUTES:g} minutes to start need {needed:.4g}",
        )
