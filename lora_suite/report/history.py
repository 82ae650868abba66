# SPDX-License-Identifier: Apache-2.0
"""A suite run of the history, and a baseline against another, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_suite.history.baselines import CaseDifference
from lora_suite.history.facts import RunFact, SessionFact
from lora_suite.report.glyphs import sparkline


def session_lines(session: SessionFact) -> Iterator[str]:
    """One suite run: a line each for it, its runs, their figures and its pairs' ratios."""
    yield f"{session.id}  {session.suite}  {session.started}  exit {session.exit_code}  {session.folder}"
    for run in session.runs:
        yield from _run_lines(run)
    for pair in session.pairs:
        effect = f"{pair.estimate:.4f} [{pair.low:.4f}, {pair.high:.4f}]"
        yield f"  {pair.state} {pair.pair}: {pair.expression} {effect}, {len(pair.ratios)} repeats"


def difference_lines(differences: Sequence[CaseDifference]) -> Iterator[str]:
    """What became of each case since the baseline, a line a figure."""
    for each in differences:
        if each.message:
            yield f"{each.own_state} {each.case}: {each.message}"
        for figure in each.figures:
            yield f"{figure.state or 'not judged'} {each.case}: {figure.metric} {figure.message}"


def _run_lines(run: RunFact) -> Iterator[str]:
    code = f", code {run.code}" if run.code else ""
    unwell = f"; {'; '.join(run.health)}" if run.health else ""
    yield f"  {run.state} {run.case} run {run.repeat}{code}{unwell}"
    for metric, value in run.values.items():
        trace = run.traces.get(metric)
        drawn = f"  {sparkline(trace.values)}" if trace else ""
        yield f"    {metric} {value:.6g}{drawn}"
