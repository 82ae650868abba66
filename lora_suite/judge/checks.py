# SPDX-License-Identifier: Apache-2.0
"""The checks that a driver declares, judged on the run's own files rather than on the driver's word."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from check_metrics import CheckResult, Expression, ExpressionError, Series, evaluate, parse
from check_metrics.text import number_text
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.verdict import CheckVerdict, State
from lora_suite.launch.record import RunRecord
from lora_suite.plan.model import BaseCase, DeclaredCheck

# The arm that a driver's own expressions read: data["train/loss"].
_ARM = "data"
_UNKNOWN_DEVICE = "an unknown device"


def judge_checks(case: BaseCase, evidence: Evidence) -> tuple[list[CheckVerdict], list[str]]:
    """Verdicts of the declared checks that apply to this run, and those that do not, each with the reason.

    Limits for several GPU models stand in one call of the driver's `check`. Where such a call has no limit
    for this run's GPU, its verdict is INCONCLUSIVE: a machine that nobody set a limit for is no pass.
    """
    verdicts: list[CheckVerdict] = []
    not_judged: list[str] = []
    device = device_of(evidence.record)
    for _, call in groupby(case.checks, key=lambda check: (check.file, check.call)):
        applying = []
        for check in call:
            reason = _unmet_condition(check, evidence.record)
            if reason is None:
                applying.append(check)
            else:
                not_judged.append(f"{check.expression} ({reason})")
        limits = [check for check in applying if check.on is not None]
        elsewhere = [check for check in limits if str(check.on).casefold() not in device.casefold()]
        if limits and len(elsewhere) == len(limits):
            verdicts.append(_no_limit(limits, device, _source(limits[0], case)))
        not_judged += [f"{check.expression} (limit for {check.on}, this is {device})" for check in elsewhere]
        verdicts += [_judged(check, evidence, case) for check in applying if check not in elsewhere]
    return verdicts, not_judged


def device_of(record: RunRecord) -> str:
    """Model of the GPU (without one: of the processor) that the run used, as its record names it."""
    strict = record.environment.strict if record.environment is not None else {}
    return str(strict.get("device") or _UNKNOWN_DEVICE)


@dataclass(frozen=True)
class Answer:
    """What a check says of one run or block: PASS, FAIL, or MISSING where what it reads is not there."""

    state: State
    value: str
    margin_percent: float | None
    message: str


def answer(
    expression: Expression, arms: Mapping[str, Mapping[str, Series]], segments: Sequence[int]
) -> Answer:
    """Evaluate a check on the series of its arms; raises ExpressionError for an arm that is not given."""
    result = evaluate(expression, arms, segments=segments)
    absent = absent_data(expression, arms) if result.value is None else None
    return Answer(
        state="MISSING" if absent else result.status,
        value=_seen_values(result),
        margin_percent=result.margin_percent,
        message=absent or result.message,
    )


def absent_data(expression: Expression, arms: Mapping[str, Mapping[str, Series]]) -> str | None:
    """What the expression reads and a run does not have at all; None where every series and step is there."""
    for arm, metric in sorted(expression.metrics):
        read = [each for name, each in arms[arm].items() if name == metric or fnmatchcase(name, metric)]
        if not any(series.steps for series in read):
            return f'{arm}["{metric}"] is not in metrics.json'
    for arm, metric, step in sorted(expression.steps):
        series = arms[arm].get(metric)
        if series is None or series.at(step) is None:
            return f'{arm}["{metric}"] has no step {step}'
    return None


def _seen_values(result: CheckResult) -> str:
    """The value of each comparison, in full."""
    if not result.comparisons:
        return "" if result.value is None else str(result.value)
    return ", ".join(number_text(comparison.value) for comparison in result.comparisons)


def _unmet_condition(check: DeclaredCheck, record: RunRecord) -> str | None:
    if check.when is None:
        return None
    key, _, wanted = check.when.partition("=")
    value: object = record.recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    # Drivers compare the same way: text as it is, everything else as JSON.
    actual = value if isinstance(value, str) else json.dumps(value)
    return None if actual == wanted else f"only when {check.when}; here it is {actual}"


def _source(check: DeclaredCheck, case: BaseCase) -> str:
    return f"{check.file or case.origin}:{check.line}"


def _judged(check: DeclaredCheck, evidence: Evidence, case: BaseCase) -> CheckVerdict:
    text, source = check.expression, _source(check, case)
    try:
        said = answer(parse(text), {_ARM: evidence.metrics}, evidence.record.segments)
    except ExpressionError as error:
        return CheckVerdict(kind="check", name=text, state="ERROR", message=str(error), source=source)
    return CheckVerdict(
        kind="check",
        name=text,
        state=said.state,
        value=said.value,
        margin_percent=said.margin_percent,
        message=said.message,
        source=source,
    )


def _no_limit(limited: Sequence[DeclaredCheck], device: str, source: str) -> CheckVerdict:
    known = ", ".join(str(check.on) for check in limited)
    return CheckVerdict(
        kind="check",
        name=" | ".join(check.expression for check in limited),
        state="INCONCLUSIVE",
        message=f"no limit is known for {device}, only for {known}",
        source=source,
    )
