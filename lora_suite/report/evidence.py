# SPDX-License-Identifier: Apache-2.0
"""What a report shows beside a check that did not pass: before and after, earlier nights, the cause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from check_metrics import ExpressionError, PairForm, parse
from lora_suite.judge.verdict import (
    Attribution,
    CaseHistory,
    CheckVerdict,
    Effect,
    MatchedSteps,
    PairCheckVerdict,
    PairVerdict,
    PhaseDelta,
    RunVerdict,
    SuiteVerdict,
)
from lora_suite.report.words import change_text, figure, signed, unit

STEP_TIME = "timing/train/step_time"
_MOVED = {
    "lora-only": "only the LoRA arm moved",
    "full-only": "only the full arm moved",
    "shared": "both arms moved alike",
    "none": "neither arm moved",
    "unclear": "which arm moved is unclear",
}


@dataclass(frozen=True)
class Evidence:
    """Beside a verdict: the two figures it compares as text, its ratio and limit, nights, cause.

    Whatever is not known is empty.
    """

    change: str = ""
    effect: Effect | None = None
    limit: float | None = None
    nights: Sequence[float] = field(default=())
    cause: str = ""


def of_pair_check(verdict: SuiteVerdict, pair: PairVerdict, check: PairCheckVerdict) -> Evidence:
    """Evidence of a pair check: its arms' typical values, from the reference (right) to the left."""
    form = pair_form(check.expression)
    history = history_of(verdict, pair.arms.get(form.left[0], ""), [form.left[1]]) if form else None
    return Evidence(
        change=_arm_change(verdict, pair, check, form) if form and form.function == "ratio" else "",
        effect=check.effect,
        limit=check.limit,
        nights=_nights(history) if history else (),
        cause=cause(pair.attribution) if pair.attribution else "",
    )


def of_run_check(verdict: SuiteVerdict, case: str, check: CheckVerdict) -> Evidence:
    """Evidence of a run's check: the median of earlier nights of a metric that it names, and tonight's."""
    history = history_of(verdict, case, _metrics(check.name))
    if history is None:
        return Evidence()
    earlier = [night.value for night in history.nights if night.started != verdict.started]
    change = f"{figure(statistics.median(earlier))} → {check.value}" if earlier and check.value else ""
    return Evidence(change=change, nights=_nights(history))


def history_of(verdict: SuiteVerdict, case: str, metrics: Sequence[str]) -> CaseHistory | None:
    """The history of a case's metric, the first of `metrics` that has one."""
    return next(
        (
            history
            for metric in metrics
            for history in verdict.history
            if history.case == case and history.metric == metric
        ),
        None,
    )


def pair_form(expression: str) -> PairForm | None:
    """The two arms and metrics that a pair check compares; None where it has another form."""
    try:
        return parse(expression).pair
    except ExpressionError:
        return None


def cause(attribution: Attribution) -> str:
    """Which arm moved, by how much, and which phase did it, in one sentence."""
    parts = [f"{_MOVED[attribution.moved]} against {attribution.reference}"]
    parts += [f"{arm} {change_text(effect)}" for arm, effect in attribution.changes.items()]
    if attribution.phases:
        parts.append(phase_text(attribution.phases))
    if attribution.message:
        parts.append(attribution.message)
    return "; ".join(parts)


def phase_text(phases: Sequence[PhaseDelta]) -> str:
    """The phase that contributes most to the difference, and its share: `optimizer +0.021 s of +0.024 s`."""
    largest = max(phases, key=lambda phase: abs(phase.delta))
    total = sum(phase.delta for phase in phases)
    return f"{largest.phase} {signed(largest.delta)} s of {signed(total)} s"


def arm_runs(verdict: SuiteVerdict, pair: PairVerdict, arm: str) -> list[RunVerdict]:
    """The runs of an arm: those made for the pair, else (a pair that reuses runs) all of its case."""
    runs = measured_runs([run for run in verdict.runs if run.case == pair.arms.get(arm)])
    return [run for run in runs if run.pair == pair.name] or runs


def runs_by_case(runs: Sequence[RunVerdict]) -> dict[str, list[RunVerdict]]:
    """The runs of each case, cases in the order of their first runs."""
    found: dict[str, list[RunVerdict]] = {}
    for run in runs:
        found.setdefault(run.case, []).append(run)
    return found


def measured_runs(runs: Sequence[RunVerdict]) -> list[RunVerdict]:
    """The runs less those that only warm the machine (repeat 0), whose figures count nowhere."""
    return [run for run in runs if run.repeat > 0]


def _nights(history: CaseHistory) -> Sequence[float]:
    """The values to draw over time; a single one is no course."""
    return [night.value for night in history.nights] if len(history.nights) > 1 else ()


def _arm_change(verdict: SuiteVerdict, pair: PairVerdict, check: PairCheckVerdict, form: PairForm) -> str:
    sides = []
    for (arm, metric), matched in (
        (form.right, [_kept(each, each.right) for each in check.matched]),
        (form.left, [_kept(each, each.left) for each in check.matched]),
    ):
        values = [statistics.median(each) for each in matched if each]
        if not values and metric == STEP_TIME:
            runs = arm_runs(verdict, pair, arm)
            values = [run.summary["median_step_time"] for run in runs if "median_step_time" in run.summary]
        if not values:
            return ""
        sides.append(f"{arm} {figure(statistics.median(values))}")
    return f"{sides[0]} → {sides[1]} {unit(form.left[1])}".rstrip()


def _kept(matched: MatchedSteps, values: Sequence[float]) -> list[float]:
    trimmed = set(matched.trimmed)
    return [value for step, value in zip(matched.steps, values, strict=False) if step not in trimmed]


def _metrics(expression: str) -> list[str]:
    try:
        return sorted(metric for _, metric in parse(expression).metrics)
    except ExpressionError:
        return []
