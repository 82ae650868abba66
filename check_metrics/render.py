# SPDX-License-Identifier: Apache-2.0
"""Shows results: a table for people, JSON and JUnit XML for programs, workflow commands for GitHub."""

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from check_metrics.text import percent_text
from check_metrics.verdict import CheckResult, comparison_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# Logs are searched for this title by launchers that know the field's checker.
TITLE = "Metric Checks"
NARROW_MARK = "!"
_STYLES = {"PASS": "green", "FAIL": "red"}
_UNLIMITED = 100_000


class _Page(io.StringIO):
    """Text in memory that is laid out for the encoding of the real output."""

    encoding = sys.stdout.encoding


def table_text(results: Sequence[CheckResult]) -> str:
    """The results as a table for the terminal; elsewhere as wide as it takes, or as COLUMNS says."""
    from rich.console import Console

    page = _Page()
    console = Console(file=page, force_terminal=sys.stdout.isatty() or None)
    wide = _wide(results)
    needed = Console(width=_UNLIMITED).measure(wide).maximum
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = max(needed, len(TITLE))
    console.print(wide if needed <= console.width else _stacked(results))
    console.print(_summary(results))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def json_text(results: Sequence[CheckResult], source: str) -> str:
    """The results as one JSON object."""
    document = {
        "file": source,
        "status": overall(results),
        "checks": [_as_json(result) for result in results],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def junit_bytes(results: Sequence[CheckResult], source: str) -> bytes:
    """The results as a JUnit XML file with one test case a check."""
    from xml.etree import ElementTree

    failures = sum(result.status == "FAIL" for result in results)
    counts = {"tests": str(len(results)), "failures": str(failures), "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": f"check_metrics {source}", **counts})
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "check_metrics", "name": result.expression}
        )
        details = _details(result)
        if result.status == "FAIL":
            failure = ElementTree.SubElement(case, "failure", {"message": details, "type": "check"})
            failure.text = details
        else:
            ElementTree.SubElement(case, "system-out").text = details
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)


def github_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    """A workflow command for each check that failed or passed narrowly."""
    for result in results:
        if result.status == "FAIL":
            yield _command("error", "check failed", result)
        elif result.is_narrow:
            yield _command("warning", "margin under 5 %", result)


def overall(results: Sequence[CheckResult]) -> str:
    """PASS where there are results and all of them pass."""
    return "PASS" if results and all(result.status == "PASS" for result in results) else "FAIL"


def _wide(results: Sequence[CheckResult]) -> "Table":
    table = _table("Status", "Check", "Value", "Margin", "Message")
    for result in results:
        table.add_row(
            _status(result),
            _plain(result.expression),
            _plain(_values(result)),
            _margin(result),
            _message(result),
        )
    return table


def _stacked(results: Sequence[CheckResult]) -> "Table":
    """For narrow screens: value and message under the check."""
    table = _table("Status", "Check, value, message", "Margin")
    for result in results:
        lines = (_plain(result.expression), _plain(_values(result)), _message(result))
        cell = _plain("\n").join(line for line in lines if line)
        table.add_row(_status(result), cell, _margin(result))
    return table


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=TITLE, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, show_lines=False)
    for name in columns:
        fixed = name in ("Status", "Margin")
        table.add_column(
            name, no_wrap=fixed, overflow="fold", justify="right" if name == "Margin" else "left"
        )
    return table


def _summary(results: Sequence[CheckResult]) -> "Text":
    passed = sum(result.status == "PASS" for result in results)
    narrow = sum(result.is_narrow for result in results)
    text = f"{passed} of {len(results)} checks pass"
    if narrow:
        text += f"; {NARROW_MARK} {narrow} with a margin under 5 %"
    return _plain(text)


def _plain(text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(text, style=style)


def _status(result: CheckResult) -> "Text":
    return _plain(result.status, _STYLES[result.status])


def _message(result: CheckResult) -> "Text":
    return _plain(result.message, "red" if result.status == "FAIL" else "dim")


def _margin(result: CheckResult) -> "Text":
    margin = result.margin_percent
    if margin is None:
        return _plain("")
    if result.is_narrow:
        return _plain(f"{NARROW_MARK} {percent_text(margin)}", "yellow")
    return _plain(percent_text(margin))


def _values(result: CheckResult) -> str:
    if result.comparisons:
        return "\n".join(map(comparison_text, result.comparisons))
    return "" if result.value is None else str(result.value)


def _details(result: CheckResult) -> str:
    margin = result.margin_percent
    parts = [
        *_values(result).split("\n"),
        "" if margin is None else f"margin {percent_text(margin)}",
        result.message,
    ]
    return "; ".join(part for part in parts if part)


def _as_json(result: CheckResult) -> dict[str, Any]:
    return {
        "check": result.expression,
        "status": result.status,
        "value": result.value,
        "margin_percent": result.margin_percent,
        "narrow": result.is_narrow,
        "comparisons": [
            {
                "left": each.left,
                "op": each.op,
                "right": each.right,
                "holds": each.holds,
                "margin_percent": each.margin_percent,
            }
            for each in result.comparisons
        ],
        "message": result.message,
    }


def _command(level: str, title: str, result: CheckResult) -> str:
    message = f"{result.expression}: {_details(result)}"
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={title.replace('%', '%25')}::{escaped}"
