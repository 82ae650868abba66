# SPDX-License-Identifier: Apache-2.0
"""An audit as text, Markdown and JSON: findings grouped by kind, with counts, examples and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lora_suite.plan.audit.baseline import Compared
from lora_suite.plan.audit.finding import KINDS, AuditFinding, AuditReport, GpuHours
from lora_suite.report.words import markdown_text

EXAMPLES = 3


def text_lines(report: AuditReport, compared: Compared) -> Iterator[str]:
    """The audit for a terminal: each kind with its count, three examples and the remedy."""
    for kind, findings in _by_kind(compared.new):
        yield f"{kind}: {len(findings)} × {KINDS[kind].title}"
        for finding in findings[:EXAMPLES]:
            yield f"  {finding.where}: {finding.message}"
        if len(findings) > EXAMPLES:
            yield f"  and {len(findings) - EXAMPLES} more"
        yield f"  remedy: {KINDS[kind].remedy}"
    for name, hours in report.gpu_hours.items():
        yield f"GPU-hours of {name}: {_hours(hours)}"
    yield _summary(report, compared)


def markdown(report: AuditReport, compared: Compared) -> str:
    """The whole audit as a Markdown page: every finding, with the keys and values of arms that differ."""
    lines = ["# Audit", "", _summary(report, compared), "", "| kind | count | what |", "| --- | --- | --- |"]
    groups = list(_by_kind(compared.new))
    lines += [f"| [{kind}](#{kind}) | {len(findings)} | {KINDS[kind].title} |" for kind, findings in groups]
    lines += ["", "| GPU-hours of | exact; as counted script by script |", "| --- | --- |"]
    lines += [f"| {name} | {_hours(hours)} |" for name, hours in report.gpu_hours.items()]
    for kind, findings in groups:
        lines += ["", f"## {kind}", "", f"{KINDS[kind].title}. Remedy: {KINDS[kind].remedy}.", ""]
        for finding in findings:
            lines.append(f"- `{finding.where}`: {markdown_text(finding.message)}")
            lines += [f"  - {markdown_text(line)}" for line in finding.details]
    return "\n".join(lines) + "\n"


def as_json(report: AuditReport, compared: Compared) -> dict[str, object]:
    """The audit as plain values; `findings` are those that are not in the baseline."""
    return {
        "schema_version": 1,
        "scripts": report.scripts,
        "checks": report.checks,
        "known": compared.known,
        "gone": compared.gone,
        "counts": {kind: len(findings) for kind, findings in _by_kind(compared.new)},
        "gpu_hours": {
            name: {"exact": float(each.exact), "floored": each.floored, "unknown_scripts": each.unknown}
            for name, each in report.gpu_hours.items()
        },
        "findings": [
            {
                "kind": each.kind,
                "file": each.file.as_posix(),
                "line": each.line,
                "subject": each.subject,
                "message": each.message,
                "details": list(each.details),
                "remedy": KINDS[each.kind].remedy,
            }
            for each in compared.new
        ],
    }


def _by_kind(findings: Sequence[AuditFinding]) -> Iterator[tuple[str, list[AuditFinding]]]:
    for kind, group in groupby(findings, key=lambda finding: finding.kind):
        yield kind, list(group)


def _hours(hours: GpuHours) -> str:
    unknown = f"; {hours.unknown} scripts do not say" if hours.unknown else ""
    return f"{float(hours.exact):.2f}; {hours.floored} where each is rounded down{unknown}"


def _summary(report: AuditReport, compared: Compared) -> str:
    known = f", {compared.known} in the baseline" if compared.known else ""
    gone = f"; {compared.gone} of the baseline are gone, record it anew" if compared.gone else ""
    return f"{report.scripts} scripts, {report.checks} checks: {len(compared.new)} findings{known}{gone}"
