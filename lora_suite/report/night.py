# SPDX-License-Identifier: Apache-2.0
"""The summary of a night: for a terminal or a mail, for a page of a CI job, and as a message to a webhook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_suite.judge.night import NightVerdict, SuiteOutcome
from lora_suite.report.words import duration, markdown_text

# Slack refuses texts of more than 3,000 characters in a block.
_BLOCK = 2900
_SHOWN = 3


def lines(night: NightVerdict) -> Iterator[str]:
    """The summary as plain text: a line a suite, what is wrong below it, the exit code last."""
    width = max(len(suite.name) for suite in night.suites)
    for suite in night.suites:
        yield f"{suite.outcome:12} {suite.name:{width}}  {_figures(suite)}"
        yield from (f"  {line}" for line in _told(suite))
    yield from (f"note: {note}" for note in night.notes)
    yield f"results: {night.directory}"
    yield f"exit {night.exit_code}: {_headline(night)}"


def markdown(night: NightVerdict) -> str:
    """The summary as Markdown."""
    rows = [
        f"| {suite.outcome} | {markdown_text(suite.name)} | {_counts(suite)} | {duration(suite.seconds)} "
        f"| {suite.gpu_hours:.3g} | {_report(suite)} |"
        for suite in night.suites
    ]
    details = [
        f"- {markdown_text(suite.name)}: {markdown_text(line)}"
        for suite in night.suites
        for line in _told(suite)
    ]
    notes = [f"- {markdown_text(note)}" for note in night.notes]
    head = "| outcome | suite | verdicts | time | GPU-hours | report |\n| --- | --- | --- | --- | --- | --- |"
    table = "\n".join([head, *rows])
    parts = [
        f"### Night of {night.started[:10]}: {_headline(night)}",
        table,
        "\n".join(details),
        "\n".join(notes),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def message(night: NightVerdict, link: str | None) -> dict[str, Any]:
    """The summary as a message that Slack, and what reads the same form, understands.

    https://docs.slack.dev/messaging/formatting-message-text says what is escaped.
    """
    text = f"lora-suite on {night.host}: {_headline(night)} (exit {night.exit_code})"
    body = []
    for suite in night.suites:
        body.append(f"*{suite.outcome}* {suite.name}: {_figures(suite)}")
        body += [f"    {line}" for line in _told(suite)[:_SHOWN]]
    body.append(f"<{link}|results>" if link else f"results: {night.directory}")
    told = "\n".join(line if line.startswith("<") else _escaped(line) for line in body)
    return {
        "text": _escaped(text),
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": f"*{_escaped(text)}*"}},
            {"type": "section", "text": {"type": "mrkdwn", "text": told[:_BLOCK]}},
        ],
    }


def _headline(night: NightVerdict) -> str:
    good = sum(suite.exit_code == 0 for suite in night.suites)
    cost = f"{duration(night.seconds)}, {night.gpu_hours:.3g} GPU-hours"
    return f"{good} of {len(night.suites)} suites passed, {cost}"


def _figures(suite: SuiteOutcome) -> str:
    return f"{_counts(suite)}, {duration(suite.seconds)}, {suite.gpu_hours:.3g} GPU-hours"


def _counts(suite: SuiteOutcome) -> str:
    return " ".join(f"{number} {state}" for state, number in suite.counts.items()) or "nothing ran"


def _told(suite: SuiteOutcome) -> list[str]:
    return [*([suite.message] if suite.message else []), *suite.problems]


def _report(suite: SuiteOutcome) -> str:
    return f"[{suite.directory}]({suite.directory}/report.html)" if suite.directory else "-"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
