# SPDX-License-Identifier: Apache-2.0
"""What a repository of the NeMo-RL family has that lets a regression pass, found without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_suite.plan.audit.arms import incomparable_arms
from lora_suite.plan.audit.check_rules import lint_checks
from lora_suite.plan.audit.finding import AuditFinding, AuditReport
from lora_suite.plan.audit.repository import Repository, read_repository
from lora_suite.plan.audit.resources import gpu_hours, lint_cost, lint_leaks, lint_resources
from lora_suite.plan.audit.shell_rules import lint_shell

__all__ = ["AuditFinding", "AuditReport", "audit"]


def audit(root: Path) -> AuditReport:
    """Read every script and recipe below `root` and return what is wrong with them, by kind and file.

    root: a repository, or a folder of scripts. Raises ConfigError where it holds no script of that family.
    """
    repository = read_repository(root)
    hours = gpu_hours(repository)
    findings = [*_findings(repository), *lint_cost(hours["all scripts"])]
    return AuditReport(
        root=root,
        scripts=len(repository.scripts) + sum(each.kind == "unreadable-script" for each in findings),
        checks=sum(len(script.checks) for script in repository.scripts),
        findings=tuple(sorted(findings)),
        gpu_hours=hours,
    )


def _findings(repository: Repository) -> Iterator[AuditFinding]:
    yield from repository.problems
    for script in repository.scripts:
        yield from lint_shell(repository, script)
        yield from lint_checks(repository, script)
        yield from lint_resources(repository, script)
    yield from lint_leaks(repository)
    yield from incomparable_arms(repository)
