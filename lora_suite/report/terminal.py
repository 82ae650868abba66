# SPDX-License-Identifier: Apache-2.0
"""The verdict as a table for a terminal: a row a case, a row a pair check, then everything that is not PASS.

On a terminal it is kept short (rows fit the width, problems fit the lines that are left, and what is left out
is counted); anywhere else, as in a log file, nothing is cut.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_suite.judge.verdict import PairCheckVerdict, PairVerdict, RunVerdict, State, SuiteVerdict, worst
from lora_suite.report.evidence import Evidence, measured_runs, runs_by_case
from lora_suite.report.glyphs import encodable, in_ascii, interval_bar, sparkline
from lora_suite.report.problems import Problem, health_flags, notes_of, problems, run_notes, short_name
from lora_suite.report.words import count, detects, duration, interval, outcome, over_floor, shortened

# Lines that a verdict may take on a terminal, and those that problems get however long the tables are.
_LINES = 20
_PROBLEM_LINES = 6
# Width that no table reaches: where the output is no terminal, nothing is to be cut.
_UNLIMITED = 10_000
_INDENT = "     "
# " %" while lines are broken: a character of one cell that no text has, and that is no space.
_TIED = "\ue000%"
# Enough of a floor's term to tell which it is: arith, memor, commu, updat.
_TERM_LETTERS = 5
# Problems that a terminal shows with what is beside them.
_EXPLAINED = 3

# Red, green and magenta can be read on light and on dark ground; yellow and blue cannot.
STYLES: dict[State, str] = {
    "PASS": "green",
    "FAIL": "bold red",
    "ERROR": "bold red",
    "MISSING": "bold magenta",
    "INCOMPARABLE": "bold magenta",
    "INCONCLUSIVE": "bold magenta",
}


def render(verdict: SuiteVerdict, console: Console) -> None:
    """Print a verdict: tables, problems, notes, where the results lie, its state and exit code."""
    head = [Text(_headline(verdict), style="bold")]
    tables = [_case_table(verdict.runs), _pair_table(verdict.pairs)]
    tables = [table for table in tables if table.row_count]
    notes = _notes(verdict, terminal=console.is_terminal)
    tail = [_result_line(verdict), _verdict_line(verdict)]
    found = problems(verdict, brief=console.is_terminal)
    if console.is_terminal:
        fixed = sum(table.row_count + 1 for table in tables) + len([*head, *notes, *tail])
        lines = _problem_lines(found, max(_LINES - fixed, _PROBLEM_LINES), console)
    else:
        lines = [line for problem in found for line in _whole(problem)]
    parts: list[Table | Text] = [*head, *tables, *lines, *notes, *tail]
    if encodable(console.encoding):
        for part in parts:
            _print(console, part)
        return
    with console.capture() as printed:
        for part in parts:
            _print(console, part)
    console.file.write(in_ascii(printed.get()))


def _print(console: Console, part: Table | Text) -> None:
    if console.is_terminal:
        console.print(part, no_wrap=True, overflow="ellipsis", highlight=False)
        return
    width = console.width
    console.width = _UNLIMITED
    console.print(part, no_wrap=True, highlight=False)
    console.width = width


def _headline(verdict: SuiteVerdict) -> str:
    runs, pairs = count(len(verdict.runs), "run"), count(len(verdict.pairs), "pair")
    return f"{verdict.suite}: {runs}, {pairs}, {duration(verdict.seconds)}"


def _table(name: str, *figures: str) -> Table:
    """A borderless table of a state, a name and figures. Only the name gives way where the width is short."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column(name, overflow="ellipsis")
    for figure in figures:
        table.add_column(figure, no_wrap=True, justify="right")
    return table


def _add_row(table: Table, state: State, name: str, *figures: str) -> None:
    table.add_row(
        Text(state, style=STYLES[state]), Text(name, no_wrap=True), *(Text(figure) for figure in figures)
    )


def _case_table(runs: Sequence[RunVerdict]) -> Table:
    floored = any("floor_time" in run.summary for run in runs)
    columns = ["floor", "× floor"] if floored else []
    table = _table("case", "runs", "checks", "loss", "s/step", *columns, "GiB")
    for case, own in runs_by_case(runs).items():
        checks = [check for run in own for check in run.checks]
        passed = sum(check.state == "PASS" for check in checks)
        _add_row(
            table,
            worst([run.state for run in own]),
            case,
            f"{sum(run.state == 'PASS' for run in own)}/{len(own)}",
            f"{passed}/{len(checks)}" if checks else "-",
            _figure(own, "final_loss", statistics.median, "{:.4f}"),
            _figure(own, "median_step_time", statistics.median, "{:.3g}"),
            *(_floor_cells(own) if floored else []),
            _figure(own, "peak_memory_gib", max, "{:.2f}"),
        )
    return table


def _floor_cells(runs: Sequence[RunVerdict]) -> tuple[str, str]:
    """The floor in seconds, and the step as its multiple, with the first letters of the term that binds."""
    measured = measured_runs(runs)
    term = next((run.floor_bound for run in measured if run.floor_bound), "")
    seconds, floor = (
        statistics.median(values) if values else None
        for values in (
            [run.summary[name] for run in measured if name in run.summary]
            for name in ("median_step_time", "floor_time")
        )
    )
    return (f"{floor:.3g}" if floor else "-"), over_floor(seconds, floor, term[:_TERM_LETTERS])


def _figure(runs: Sequence[RunVerdict], name: str, combine: Callable[[list[float]], float], form: str) -> str:
    values = [run.summary[name] for run in measured_runs(runs) if name in run.summary]
    return form.format(combine(values)) if values else "-"


def _pair_table(pairs: Sequence[PairVerdict]) -> Table:
    table = _table("pair", "effect", "95 % interval", "limit", "detects")
    for pair in pairs:
        for check in pair.checks:
            name = f"{pair.name}: {short_name(check.expression)}"
            # A pair that lacks runs is not green, whatever the runs that are there say.
            state = worst([pair.own_state, check.state])
            _add_row(table, state, name, *_effect_cells(check))
        if not pair.checks:
            _add_row(table, pair.state, pair.name, "-", "-", "-", "-")
    return table


def _effect_cells(check: PairCheckVerdict) -> tuple[str, str, str, str]:
    limit = f"{check.operator} {check.limit:g}" if check.limit is not None else "-"
    effect = check.effect
    if effect is None:
        return shortened(check.value), "-", limit, "-"
    return f"{effect.estimate:.3f}", interval(effect), limit, detects(effect.smallest_detectable)


def _problem_lines(found: Sequence[Problem], room: int, console: Console) -> list[Text]:
    """Every problem in one line at least; lines to spare show more of the messages, from the first on.

    What is beside a problem comes on top of them, of pairs before others.
    """
    shown = found if len(found) <= room else found[: room - 1]
    explained = sorted(shown, key=lambda problem: problem.evidence.effect is None)[:_EXPLAINED]
    spare = max(room - len(found), 0)
    lines: list[Text] = []
    for problem in shown:
        head, log = _fitted(problem, 1 + spare, console)
        spare -= len(head) + len(log) - 1
        beside = _evidence_lines(problem.evidence, console.width) if problem in explained else []
        lines += [*head, *beside, *log]
    if len(shown) < len(found):
        hidden = Counter(problem.state for problem in found[len(shown) :])
        counts = ", ".join(f"{number} {state}" for state, number in hidden.items())
        lines.append(Text(f"… and {counts} more in verdict.json", style="dim"))
    return lines


def _fitted(problem: Problem, room: int, console: Console) -> tuple[list[Text], list[Text]]:
    """A problem in at most `room` lines: what it is, and of a quoted log the end, which says most."""
    what, *log = problem.message.splitlines() or [""]
    head = _wrapped(_problem_text(problem, what), console)
    if len(head) > room:
        head = head[:room]
        head[-1].rstrip()
        head[-1].truncate(console.width - 2)
        head[-1].append(" …")
    tail = [Text(line) for line in log]
    return head, tail[max(len(tail) - (room - len(head)), 0) :]


def _wrapped(text: Text, console: Console) -> list[Text]:
    """Lines no wider than the terminal, none of which begins with a number's percent sign."""
    text.plain = text.plain.replace(" %", _TIED)
    lines = list(text.wrap(console, console.width))
    for line in lines:
        line.plain = line.plain.replace(_TIED, " %")
    return lines


def _whole(problem: Problem) -> list[Text]:
    """A problem uncut, for what is no terminal."""
    return [_problem_text(problem, problem.message), *_evidence_lines(problem.evidence, _UNLIMITED)]


def _evidence_lines(evidence: Evidence, width: int) -> list[Text]:
    """Before → after, the interval against the limit, the last nights, the cause."""
    pieces = [evidence.change]
    if evidence.effect is not None and evidence.limit is not None:
        pieces.append(interval_bar(evidence.effect, evidence.limit))
    if evidence.nights:
        pieces.append(f"nights {sparkline(evidence.nights)}")
    lines: list[str] = []
    for piece in filter(None, pieces):
        if lines and len(_INDENT + lines[-1]) + 2 + len(piece) <= width:
            lines[-1] += f"  {piece}"
        else:
            lines.append(piece)
    if evidence.cause:
        tied = f"cause: {evidence.cause}".replace(" %", _TIED)
        lines += [line.replace(_TIED, " %") for line in textwrap.wrap(tied, width - len(_INDENT))]
    return [Text(_INDENT + line, style="dim") for line in lines]


def _problem_text(problem: Problem, message: str) -> Text:
    return Text.assemble((problem.state, STYLES[problem.state]), f" {problem.title}: {message}")


def _notes(verdict: SuiteVerdict, *, terminal: bool) -> list[Text]:
    notes = [f"note: {pair.name}: {note}" for pair in verdict.pairs for note in notes_of(verdict, pair)]
    notes += [f"note: {each.case}: {each.metric}: {each.alert}" for each in verdict.history if each.alert]
    notes += [f"note: {place}: {note}" for place, note in run_notes(verdict.runs)]
    flags = [f"{place}: {flag}" for place, flag in health_flags(verdict.runs)]
    if terminal and len(flags) > 1:
        flags = [f"{flags[0]} (and {len(flags) - 1} more in verdict.json)"]
    notes += [f"note: {flag}" for flag in flags]
    skipped = dict.fromkeys((run.case, check) for run in verdict.runs for check in run.not_judged)
    if skipped and terminal:
        notes.append(f"note: {count(len(skipped), 'check')} not judged, conditions not met (verdict.json)")
    elif skipped:
        notes += [f"note: not judged: {case}: {check}" for case, check in skipped]
    return [Text(note, style="dim") for note in notes]


def _result_line(verdict: SuiteVerdict) -> Text:
    return Text(f"results: {verdict.directory}")


def _verdict_line(verdict: SuiteVerdict) -> Text:
    counts = Counter(verdict.states)
    told = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state]) or "nothing ran"
    word = outcome(verdict)
    style = STYLES["MISSING"] if word == "INTERRUPTED" else STYLES[word]
    return Text.assemble((word, style), f" (exit {verdict.exit_code}): {told}")
