# SPDX-License-Identifier: Apache-2.0
"""The verdict as a comment on a pull request: at most ten rows, the rest folded.

It starts with a marker that is not shown, by which the next comment on the same suite finds this one and
takes its place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from lora_suite.judge.verdict import PairCheckVerdict, SuiteVerdict
from lora_suite.report.evidence import Evidence
from lora_suite.report.glyphs import interval_bar, sparkline
from lora_suite.report.problems import Problem, health_flags, problems, short_name
from lora_suite.report.reproduce import command
from lora_suite.report.words import count, detects, duration, interval, markdown_text, outcome, shortened

ROWS = 10
# GitHub refuses comments of more than 65,536 characters: what is quoted stays far below that.
_LOG_LINES = 15
_LINE_WIDTH = 160
_MESSAGE_WIDTH = 300
_PAIR_ROWS = 60

_FENCE = re.compile("`{3,}")


def render(verdict: SuiteVerdict) -> str:
    """The comment, in GitHub's Markdown."""
    found = problems(verdict, brief=True)
    parts = [marker(verdict.suite), _headline(verdict)]
    if found:
        parts.append(_problem_table(found))
    parts += [_folded(problem) for problem in found[:ROWS] if "\n" in problem.message]
    parts += [_pairs(verdict), _health(verdict), _again(verdict)]
    return "\n\n".join(filter(None, parts)) + "\n"


def marker(suite: str) -> str:
    """What a suite's comments have in common and nobody sees."""
    return f"<!-- lora-suite: {re.sub('[^A-Za-z0-9._-]', '-', suite)} -->"


def _headline(verdict: SuiteVerdict) -> str:
    counts = Counter(verdict.states)
    told = ", ".join(f"{number} {state}" for state, number in counts.most_common()) or "nothing ran"
    ran = (
        f"{count(len(verdict.runs), 'run')}, {count(len(verdict.pairs), 'pair')}, {duration(verdict.seconds)}"
    )
    return f"### {outcome(verdict)}: {_text(verdict.suite)}\n\n{told} ({ran}, exit {verdict.exit_code})"


def _problem_table(found: Sequence[Problem]) -> str:
    shown = found if len(found) <= ROWS else found[: ROWS - 1]
    lines = ["| state | what | why | before → after | last nights |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {problem.state} | {_text(problem.title)} | {_why(problem)} | {_text(problem.evidence.change)} "
        f"| {_code(sparkline(problem.evidence.nights))} |"
        for problem in shown
    ]
    if len(shown) < len(found):
        hidden = Counter(problem.state for problem in found[len(shown) :])
        counts = ", ".join(f"{number} {state}" for state, number in hidden.items())
        lines.append(f"| … | and {counts} more in report.html | | | |")
    return "\n".join(lines)


def _why(problem: Problem) -> str:
    parts = [_text(problem.message.partition("\n")[0])]
    parts.append(_drawn(problem.evidence))
    if problem.evidence.cause:
        parts.append(f"**cause:** {_text(problem.evidence.cause)}")
    return "<br>".join(filter(None, parts))


def _drawn(evidence: Evidence) -> str:
    if evidence.effect is None or evidence.limit is None:
        return ""
    return _code(interval_bar(evidence.effect, evidence.limit))


def _folded(problem: Problem) -> str:
    """The end of a quoted log."""
    _, *log = problem.message.splitlines()
    text = "\n".join(line[:_LINE_WIDTH] for line in log[-_LOG_LINES:])
    longest = max((len(run) for run in _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    title = f"{problem.state} {_text(problem.place)}: last lines"
    return f"<details><summary>{title}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>"


def _pairs(verdict: SuiteVerdict) -> str:
    rows = [
        f"| {pair.state} | {_text(f'{pair.name}: {short_name(check.expression)}')} | {_effect(check)} |"
        for pair in verdict.pairs
        for check in pair.checks
    ]
    if not rows:
        return ""
    shown = rows[:_PAIR_ROWS]
    if len(shown) < len(rows):
        shown.append(f"| … | {len(rows) - len(shown)} more in report.html | | | | |")
    head = (
        "| state | pair | effect | 95 % interval | limit | detects |\n| --- | --- | --- | --- | --- | --- |"
    )
    table = "\n".join([head, *shown])
    return f"<details><summary>All pairs</summary>\n\n{table}\n\n</details>"


def _effect(check: PairCheckVerdict) -> str:
    limit = _text(f"{check.operator} {check.limit:g}") if check.limit is not None else "-"
    if check.effect is None:
        return f"{_text(shortened(check.value))} | - | {limit} | -"
    effect = check.effect
    return (
        f"{effect.estimate:.3f} | {_text(interval(effect))} | {limit} | {detects(effect.smallest_detectable)}"
    )


def _health(verdict: SuiteVerdict) -> str:
    flags = [f"- {_text(place)}: {_text(flag)}" for place, flag in health_flags(verdict.runs)]
    if not flags:
        return ""
    more = [f"- and {len(flags) - ROWS} more in report.html"] if len(flags) > ROWS else []
    return "\n".join(["The machine was not well:", "", *flags[:ROWS], *more])


def _again(verdict: SuiteVerdict) -> str:
    lines = ["<details><summary>Run it again; environment</summary>", "", "```sh", command(verdict), "```"]
    lines += list(_environment(verdict))
    return "\n".join([*lines, "", "</details>"])


def _environment(verdict: SuiteVerdict) -> Iterator[str]:
    for name, facts in verdict.environments.items():
        told = ", ".join(f"{key} {value}" for key, value in facts.items())
        yield f"\n{_text(f'{name}: {told}'[: 4 * _MESSAGE_WIDTH])}"
    codes = dict.fromkeys(run.code for run in verdict.runs if run.code)
    if codes:
        yield f"\ncode: {_text(', '.join(codes))}"


def _text(text: str) -> str:
    """Text as it is, of one line, that mentions nobody."""
    line = " ".join(text.split())
    cut = line if len(line) <= _MESSAGE_WIDTH else f"{line[: _MESSAGE_WIDTH - 1]}…"
    return markdown_text(cut).replace("&", "&amp;").replace("@", "@\u200b")


def _code(text: str) -> str:
    """Text in a code span within a table; a no-break space keeps its width."""
    return f"`{text}`".replace(" ", "\u00a0") if text else ""
