# SPDX-License-Identifier: Apache-2.0
"""A comparison of two runs or suite runs, as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from lora_suite.history.comparison import CaseComparison, Comparison, PairComparison
from lora_suite.judge.verdict import State
from lora_suite.report.terminal import STYLES


def render(comparison: Comparison, console: Console) -> None:
    """Print a comparison: every case and pair, then its state and exit code."""
    for line in lines(comparison):
        console.print(line, highlight=False, soft_wrap=True)


def lines(comparison: Comparison) -> Iterator[Text]:
    """Every case and pair, then the state and exit code of the whole."""
    yield Text(f"{comparison.right} against {comparison.left}", style="bold")
    if comparison.lenient and any(case.differing for case in comparison.cases):
        yield Text("compared although recipe or environment differ, as asked for")
    for case in comparison.cases:
        yield from _case(case)
    for pair in comparison.pairs:
        yield from _pair(pair)
    yield _line(comparison.state, f"exit {comparison.exit_code}")


def _case(case: CaseComparison) -> Iterator[Text]:
    yield _line(case.state, f"{case.case}{': ' if case.message else ''}{case.message}")
    for each in case.differing:
        yield Text(f"    {each}")
    for figure in case.figures:
        before, after = statistics.median(figure.left), statistics.median(figure.right)
        yield _line(figure.state, f"{figure.metric} {before:.4g} → {after:.4g}: {figure.message}", "  ")
    if case.loss is not None:
        yield _line(case.loss.state, f"loss, {case.loss.tier}: {case.loss.message}", "  ")


def _pair(pair: PairComparison) -> Iterator[Text]:
    yield _line(pair.state, f"pair {pair.pair}: {pair.message}")
    if pair.attribution is not None:
        for phase in pair.attribution.phases:
            yield Text(
                f"    {phase.phase} {phase.left:.4g} → {phase.right:.4g} s ({1e3 * phase.delta:+.3g} ms)"
            )


def _line(state: State | None, text: str, indent: str = "") -> Text:
    if state is None:
        return Text(f"{indent}not judged {text}")
    return Text.assemble(indent, (state, STYLES[state]), f" {text}")
