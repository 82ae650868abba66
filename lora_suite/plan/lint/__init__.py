# SPDX-License-Identifier: Apache-2.0
"""Finds what is wrong with recipes, drivers and suites before anything is trained.

Rules, by the name that a finding carries. Errors: `recipe`, `driver`, `suite` (does not resolve), `name`,
`recipe-without-driver`, `driver-without-recipe`, `steps`, `unparsable-check`, `unknown-arm`,
`unknown-metric`, `unreachable-step`, `cannot-fail`, `equal-steps`,
`condition`, `minutes`, `budget`, `incomparable-arms`.
Warnings: `unreadable` (another trainer's file: only its own runs are MISSING), `waiver-expired`,
`waiver-without-effect`, `unquoted-arguments`, `pipe-before-pipefail`, `no-margin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from lora_suite.config import ConfigError
from lora_suite.config.yaml_source import read_yaml
from lora_suite.plan.lint.cases import COMMON, CaseLint
from lora_suite.plan.lint.finding import INCOMPARABLE_ARMS, Finding, blocking, from_config_error
from lora_suite.plan.lint.suites import lint_pairs_and_budget
from lora_suite.plan.load import load_plan
from lora_suite.plan.model import Case, Plan

__all__ = ["INCOMPARABLE_ARMS", "Finding", "blocking", "lint", "lint_plan"]

FOLDERS = ("recipes", "scripts", "suites")


def lint(paths: Sequence[Path] = (), today: date | None = None) -> list[Finding]:
    """Return the findings in recipes, drivers and suites, in order of file and line, each once.

    paths: files, or folders: of a folder that has ``recipes/``, ``scripts/`` or ``suites/`` those, else its
    own files. None: the current folder. A suite is judged together with the recipes and drivers that it
    names. today: the day for which waivers count. Raises ConfigError for paths that cannot be read or hold
    nothing.
    """
    day = today or datetime.now(UTC).date()
    cases = CaseLint(day)
    found: set[Finding] = set()
    for path in _files(paths or [Path()]):
        found.update(_lint_file(path, cases))
    return sorted(found)


def lint_plan(plan: Plan, today: date | None = None) -> list[Finding]:
    """Return the findings in a plan and in the recipes and drivers of its cases.

    A recipe and its driver are judged as they are written, without the command line's overrides; pairs and
    cost as they are planned. Of an external case only what the suite says is judged.
    """
    return sorted(_lint_plan(plan, CaseLint(today or datetime.now(UTC).date())))


def _lint_plan(plan: Plan, cases: CaseLint) -> set[Finding]:
    """The findings of a plan."""
    found = set(lint_pairs_and_budget(plan))
    for case in plan.cases.values():
        if isinstance(case, Case):
            found.update(cases.recipe(case.recipe_path), cases.driver(case.driver_path))
    return found


def _lint_file(path: Path, cases: CaseLint) -> Iterable[Finding]:
    """The findings of one file by its kind; raises ConfigError for a file that is no YAML or no text."""
    if path.suffix == ".sh":
        return cases.driver(path)
    tree = read_yaml(path).tree
    if path.resolve().parent.name != "suites" and {"cases", "pairs"}.isdisjoint(tree):
        return cases.recipe(path)
    try:
        return _lint_plan(load_plan(path), cases)
    except ConfigError as caught:
        return from_config_error(caught, path, "suite")


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Every file that the paths stand for."""
    for path in paths:
        if path.is_dir():
            folders = [path / name for name in FOLDERS if (path / name).is_dir()] or [path]
            files = [file for folder in folders for file in sorted(folder.iterdir()) if _is_lintable(file)]
            if not files:
                raise ConfigError(f"{path}: holds no recipes, drivers or suites to lint")
            yield from files
        elif not path.is_file():
            raise ConfigError(f"{path}: there is no such file or folder")
        elif not _is_lintable(path):
            raise ConfigError(f"{path}: is neither a recipe or suite (.yaml) nor a driver (.sh)")
        else:
            yield path


def _is_lintable(path: Path) -> bool:
    """Whether the file is a recipe, suite or driver by its name."""
    return path.is_file() and path.suffix in (".yaml", ".sh") and path.name != COMMON
