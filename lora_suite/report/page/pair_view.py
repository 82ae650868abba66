# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a pair: its checks with their charts, and its arms side by side."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lora_suite.judge.verdict import (
    MatchedSteps,
    PairCheckVerdict,
    PairVerdict,
    RunVerdict,
    State,
    SuiteVerdict,
    worst,
)
from lora_suite.report.evidence import Evidence, arm_runs, cause, of_pair_check, pair_form
from lora_suite.report.page.charts import (
    TRIMMED,
    Chart,
    Curve,
    effect_chart,
    line_chart,
    scatter_chart,
    waterfall_chart,
)
from lora_suite.report.page.series import TOTALS, curves_of, memory_metric
from lora_suite.report.problems import check_anchor, notes_of, pair_anchor, short_name
from lora_suite.report.words import shortened, unit


@dataclass(frozen=True)
class PairCheckView:
    """A pair check with the charts of its ratio."""

    anchor: str
    short: str
    verdict: PairCheckVerdict
    evidence: Evidence
    effect_chart: Chart | None
    charts: Sequence[Chart]

    @property
    def brief_value(self) -> str:
        """The value in a table's width."""
        return shortened(self.verdict.value) if self.verdict.value else "–"


@dataclass(frozen=True)
class PairView:
    """A pair, its checks, and charts that hold its arms against each other."""

    anchor: str
    verdict: PairVerdict
    checks: Sequence[PairCheckView]
    cause: str
    notes: Sequence[str]
    charts: Sequence[Chart]

    def state_of(self, check: PairCheckVerdict) -> State:
        """A check's state in the overview: a pair that lacks runs is green in no row."""
        return worst([self.verdict.own_state, check.state])


def pair_view(verdict: SuiteVerdict, pair: PairVerdict) -> PairView:
    """Everything the page shows of a pair; a chart whose data a verdict lacks is left out."""
    arms = {arm: arm_runs(verdict, pair, arm) for arm in pair.arms}
    return PairView(
        anchor=pair_anchor(pair.name),
        verdict=pair,
        checks=[
            PairCheckView(
                check_anchor(pair.name, check.expression),
                short_name(check.expression),
                check,
                of_pair_check(verdict, pair, check),
                _effect_chart(check),
                _step_charts(check),
            )
            for check in pair.checks
        ],
        cause=cause(pair.attribution) if pair.attribution else "",
        notes=notes_of(verdict, pair),
        charts=[chart for chart in _arm_charts(pair, arms) if chart is not None],
    )


def _effect_chart(check: PairCheckVerdict) -> Chart | None:
    effect = check.effect
    if effect is None:
        return None
    form = pair_form(check.expression)
    function = f"{form.function} of " if form and form.function != "ratio" else ""
    title = f"{function}{'/'.join(_arms(check))} and its {100 * effect.confidence:g} % interval"
    return effect_chart(title, effect.estimate, effect.low, effect.high, effect.ratios, check.limit)


def _step_charts(check: PairCheckVerdict) -> list[Chart]:
    """The matched steps: one arm against the other, and their ratio over time."""
    left, right = _arms(check)
    form = pair_form(check.expression)
    symbol = f" ({unit(form.left[1])})" if form and unit(form.left[1]) else ""
    dots = [curve for each in check.matched for curve in _scatter_curves(each)]
    title = f"Each step: {left} against {right}"
    scatter = scatter_chart(title, f"{right}{symbol}", f"{left}{symbol}", dots, check.limit)
    traces = [_ratio_trace(each, f"{left}/{right}", check.limit) for each in check.matched]
    return [chart for chart in (scatter, *traces) if chart is not None]


def _arms(check: PairCheckVerdict) -> tuple[str, str]:
    form = pair_form(check.expression)
    return (form.left[0], form.right[0]) if form else ("left", "right")


def _scatter_curves(matched: MatchedSteps) -> list[Curve]:
    curves = []
    trimmed = set(matched.trimmed)
    for name, style, wanted in (
        (f"repeat {matched.repeat}", f"r{(matched.repeat - 1) % 4}", False),
        ("left out", TRIMMED, True),
    ):
        points = [
            (right, left, f"repeat {matched.repeat}, step {step}")
            for step, left, right in zip(matched.steps, matched.left, matched.right, strict=False)
            if (step in trimmed) is wanted
        ]
        if points:
            at, values, labels = zip(*points, strict=True)
            curves.append(Curve(name, style, at, values, True, labels))
    return curves


def _ratio_trace(matched: MatchedSteps, name: str, limit: float | None) -> Chart | None:
    ratios = [
        (step, left / right)
        for step, left, right in zip(matched.steps, matched.left, matched.right, strict=False)
        if right > 0
    ]
    trimmed = set(matched.trimmed)
    kept = [(step, ratio) for step, ratio in ratios if step not in trimmed]
    if not kept:
        return None
    median = statistics.median(ratio for _, ratio in kept)
    levels = [("median", "median", median)]
    if limit is not None:
        levels.append((f"limit {limit:g}", "limit", limit))
    curves = [Curve(name, "a0", *_split(kept))]
    if left_out := [(step, ratio) for step, ratio in ratios if step in trimmed]:
        curves.append(Curve("left out", TRIMMED, *_split(left_out), dots=True))
    note = f"Median {median:.4f}."
    if trimmed:
        note += f" Left out: {len(trimmed)} of the first steps."
    return line_chart(
        f"Repeat {matched.repeat}: {name} by step", "step", "", curves, levels=levels, note=note, height=170
    )


def _split(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    return [at for at, _ in points], [value for _, value in points]


def _arm_charts(pair: PairVerdict, arms: dict[str, list[RunVerdict]]) -> list[Chart | None]:
    charts: list[Chart | None] = []
    if pair.attribution is not None and pair.attribution.phases:
        phases = [(phase.phase, phase.left, phase.right) for phase in pair.attribution.phases]
        title = f"Phases of the arm that moved: {pair.attribution.reference} to now"
        charts.append(waterfall_chart(title, "reference", "now", phases))
    names = list(arms)
    for before, after in itertools.pairwise(names):
        title = f"Phases of a step: {before} to {after}"
        charts.append(waterfall_chart(title, before, after, _phases(arms[before], arms[after])))
    every = [run for runs in arms.values() for run in runs]
    for metric, title in (("train/loss", "Loss"), ("validation/loss", "Validation loss")):
        charts.append(line_chart(f"{title} of the arms", "step", "", _by_arm(arms, metric)))
    if memory := memory_metric(every):
        title = f"Memory of the arms ({memory.words})"
        charts.append(line_chart(title, memory.x_label, "GiB", _by_arm(arms, memory.metric)))
    return charts


def _by_arm(arms: dict[str, list[RunVerdict]], metric: str) -> list[Curve]:
    return [
        curve
        for number, (arm, runs) in enumerate(arms.items())
        for curve in curves_of(runs, metric, [f"a{number % 4}"], f"{arm} run")
    ]


def _phases(before: Sequence[RunVerdict], after: Sequence[RunVerdict]) -> list[tuple[str, float, float]]:
    """(phase, seconds before, seconds after): the median over runs; nothing where a side has no phases."""
    sides = []
    for runs in (before, after):
        known = [run.phases for run in runs if run.phases]
        names = [
            name for name in dict.fromkeys(name for each in known for name in each) if name not in TOTALS
        ]
        sides.append({name: statistics.median(each.get(name, 0.0) for each in known) for name in names})
    left, right = sides
    if not (left and right):
        return []
    return [(name, left.get(name, 0.0), right.get(name, 0.0)) for name in dict.fromkeys([*left, *right])]
