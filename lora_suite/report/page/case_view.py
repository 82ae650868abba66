# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a case: its runs, its checks over all repeats, its series, its history."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from check_metrics.series import describe_steps, is_keyed_by_step
from lora_suite.judge.verdict import (
    CaseHistory,
    ChangePoint,
    CheckVerdict,
    RunVerdict,
    State,
    SuiteVerdict,
    worst,
)
from lora_suite.report.evidence import measured_runs
from lora_suite.report.page.charts import Chart, Curve, line_chart
from lora_suite.report.page.series import curves_of, memory_metric, x_label
from lora_suite.report.problems import case_anchor, check_anchor, run_anchor
from lora_suite.report.words import over_floor, unit

_STYLES = ("r0", "r1", "r2", "r3")


@dataclass(frozen=True)
class RunView:
    """One run with its place in the page."""

    anchor: str
    verdict: RunVerdict


@dataclass(frozen=True)
class CheckView:
    """A check of a case: its worst verdict, and the values of every repeat."""

    anchor: str
    kind: str
    name: str
    state: State
    repeats: str
    values: Sequence[str]
    message: str
    source: str


@dataclass(frozen=True)
class HistoryView:
    """A metric of a case over time: chart and the changes found in it."""

    metric: str
    chart: Chart
    changes: Sequence[ChangePoint]
    alert: str


@dataclass(frozen=True)
class CaseView:
    """A case over all its repeats."""

    anchor: str
    name: str
    state: State
    runs: Sequence[RunView]
    checks: Sequence[CheckView]
    charts: Sequence[Chart]
    history: Sequence[HistoryView]
    not_judged: Sequence[str]

    @property
    def passed_runs(self) -> int:
        """Runs that passed."""
        return sum(run.verdict.state == "PASS" for run in self.runs)

    @property
    def passed_checks(self) -> int:
        """Checks that passed in every run."""
        return sum(check.state == "PASS" for check in self.checks)

    def figure(self, name: str) -> float | None:
        """A summary figure: the median over runs, of memory the greatest; None where none was measured."""
        runs = measured_runs([run.verdict for run in self.runs])
        values = [run.summary[name] for run in runs if name in run.summary]
        if not values:
            return None
        return max(values) if name == "peak_memory_gib" else statistics.median(values)

    @property
    def over_floor(self) -> str:
        """The step as a multiple of its floor, and the term that binds the floor."""
        runs = measured_runs([run.verdict for run in self.runs])
        term = next((run.floor_bound for run in runs if run.floor_bound), "")
        return over_floor(self.figure("median_step_time"), self.figure("floor_time"), term)


def case_view(verdict: SuiteVerdict, case: str) -> CaseView:
    """Everything the page shows of a case; a chart whose data a verdict lacks is left out."""
    runs = [run for run in verdict.runs if run.case == case]
    return CaseView(
        anchor=case_anchor(case),
        name=case,
        state=worst([run.state for run in runs]),
        runs=[RunView(run_anchor(run), run) for run in runs],
        checks=_checks(case, runs),
        charts=_charts(measured_runs(runs)),
        history=[view for each in verdict.history if each.case == case if (view := _history(each))],
        not_judged=list(dict.fromkeys(reason for run in runs for reason in run.not_judged)),
    )


def _checks(case: str, runs: Sequence[RunVerdict]) -> list[CheckView]:
    """The checks of all runs by name; those that did not pass first."""
    groups: dict[str, list[tuple[int, CheckVerdict]]] = {}
    for run in runs:
        for check in run.checks:
            groups.setdefault(check.name, []).append((run.repeat, check))
    views = [_check(case, group) for group in groups.values()]
    return sorted(views, key=lambda view: view.state == "PASS")


def _check(case: str, group: Sequence[tuple[int, CheckVerdict]]) -> CheckView:
    state = worst([check.state for _, check in group])
    shown = next(check for _, check in group if check.state == state)
    bad = sorted({repeat for repeat, check in group if check.state != "PASS"})
    return CheckView(
        anchor=check_anchor(case, shown.name),
        kind=shown.kind,
        name=shown.name,
        state=state,
        repeats=describe_steps(bad) if bad else "",
        values=list(dict.fromkeys(check.value for _, check in group if check.value)),
        message=shown.message,
        source=shown.source,
    )


def _charts(runs: Sequence[RunVerdict]) -> list[Chart]:
    """A chart a stored series, all runs in it; of memory by device, the fullest alone."""
    memory = memory_metric(runs)
    stored = dict.fromkeys(metric for run in runs for metric in run.series)
    metrics = [metric for metric in stored if is_keyed_by_step(metric)]
    if memory is not None and memory.metric not in metrics:
        metrics.append(memory.metric)
    charts = [
        line_chart(_title(metric), x_label(metric), "", curves_of(runs, metric, _STYLES, "run"))
        for metric in metrics
    ]
    return [chart for chart in charts if chart is not None]


def _title(metric: str) -> str:
    return f"{metric} ({unit(metric)})" if unit(metric) else metric


def _history(history: CaseHistory) -> HistoryView | None:
    nights = history.nights
    values = [night.value for night in nights]
    at = [float(number) for number in range(1, len(nights) + 1)]
    labels = [" ".join(filter(None, (night.started[:16], night.code[:10]))) for night in nights]
    curves = [
        Curve("level", "median", [at[first], at[last]], [level, level])
        for first, last in _segments(history)
        for level in (statistics.median(values[first : last + 1]),)
    ]
    curves.append(Curve(_title(history.metric), "a0", at, values, dots=True, labels=labels))
    marks = [("change", "limit", change.at + 0.5) for change in history.changes]
    chart = line_chart(
        f"{_title(history.metric)} over {len(nights)} runs", "run, oldest first", "", curves, marks=marks
    )
    if chart is None or not nights:
        return None
    return HistoryView(history.metric, chart, history.changes, history.alert)


def _segments(history: CaseHistory) -> list[tuple[int, int]]:
    """First and last index of each stretch between changes."""
    starts = [0, *sorted({change.at for change in history.changes if 0 < change.at < len(history.nights)})]
    ends = [*(start - 1 for start in starts[1:]), len(history.nights) - 1]
    return [(first, last) for first, last in zip(starts, ends, strict=True) if first <= last]
