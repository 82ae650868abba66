# SPDX-License-Identifier: Apache-2.0
"""Rules about one recipe, one driver, and the two together."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

from lora_suite.blueprint import preflight
from lora_suite.config import ConfigError, ResolvedRecipe, load_recipe
from lora_suite.config.naming import check_stem
from lora_suite.config.nearest import nearest_key
from lora_suite.config.tree import flatten
from lora_suite.config.yaml_source import read_yaml
from lora_suite.plan.driver import DriverRecord, read_driver
from lora_suite.plan.lint.driver_text import lint_driver_text
from lora_suite.plan.lint.expressions import STARTUP_MINUTES, Subject, lint_check, step_time_limit
from lora_suite.plan.lint.finding import Finding, error, from_config_error
from lora_suite.plan.lint.recorded import lint_margins
from lora_suite.plan.lint.waivers import lint_waiver
from lora_suite.plan.model import DeclaredCheck

COMMON = "common.sh"


class CaseLint:
    """Lints recipes and drivers, each file once however often it is asked for.

    today: the day for which waivers count.
    """

    def __init__(self, today: date) -> None:
        self._today = today
        self._found: dict[Path, list[Finding]] = {}
        self._resolved: dict[tuple[Path, tuple[str, ...]], ResolvedRecipe] = {}
        self._parents: dict[Path, frozenset[Path]] = {}

    def recipe(self, path: Path) -> list[Finding]:
        """What is wrong with a recipe: does it resolve, does its name fit, has it a driver."""
        if path.resolve() not in self._found:
            self._found[path.resolve()] = list(self._lint_recipe(path))
        return self._found[path.resolve()]

    def driver(self, path: Path) -> list[Finding]:
        """What is wrong with a driver: its text, its checks, its minutes and steps, its waivers."""
        if path.resolve() not in self._found:
            self._found[path.resolve()] = list(self._lint_driver(path))
        return self._found[path.resolve()]

    def _lint_recipe(self, path: Path) -> Iterator[Finding]:
        try:
            resolved = self._load(path)
            preflight(resolved.recipe, path)
        except ConfigError as caught:
            yield from from_config_error(caught, path, "recipe")
            return
        driver = _sibling(path, "scripts", "sh")
        if not driver.is_file():
            if path.resolve() in self._parents_in(path.resolve().parent):
                return
            if driver.parent.is_dir():
                yield error(path, 0, "recipe-without-driver", f"no driver runs this recipe; write {driver}")
        try:
            check_stem(path.stem, resolved.recipe)
        except ConfigError as caught:
            yield error(path, 0, "name", str(caught))

    def _lint_driver(self, path: Path) -> Iterator[Finding]:
        yield from lint_driver_text(path, _text(path))
        recipe_path = _sibling(path, "recipes", "yaml")
        if not recipe_path.is_file():
            message = f"there is no recipe of this driver's name; write {recipe_path}"
            yield error(path, 0, "driver-without-recipe", message)
            return
        try:
            record = read_driver(path)
            if not record.train:
                raise ConfigError(f"{path}: never calls train")
        except ConfigError as caught:
            yield from from_config_error(caught, path, "driver")
            return
        try:
            resolved = self._load(recipe_path, tuple(record.train[-1]))
        except ConfigError as caught:
            yield from from_config_error(caught, recipe_path, "recipe")
            return
        yield from _lint_declarations(path, record, resolved, self._today)

    def _load(self, path: Path, overrides: tuple[str, ...] = ()) -> ResolvedRecipe:
        key = path.resolve(), overrides
        if key not in self._resolved:
            self._resolved[key] = load_recipe(path, overrides)
        return self._resolved[key]

    def _parents_in(self, folder: Path) -> frozenset[Path]:
        if folder not in self._parents:
            self._parents[folder] = frozenset(_named_as_defaults(folder))
        return self._parents[folder]


def _lint_declarations(
    path: Path, record: DriverRecord, resolved: ResolvedRecipe, today: date
) -> Iterator[Finding]:
    """Rules that need what the driver declares and what the recipe resolves to."""
    checks = record.declared_checks(path, today)
    steps = resolved.recipe.sft.max_num_steps
    if record.steps != steps:
        text = f"declare_case says steps={record.steps}, but the recipe trains {steps} (sft.max_num_steps)"
        yield error(path, 0, "steps", text)
    for check, live in zip(checks, (each.expression for each in record.checks), strict=True):
        expressions = {check.expression, live, *([check.waiver.revert_to] if check.waiver else [])}
        for expression in sorted(expressions):
            subject = Subject(expression, path, check.line, ("data",), (resolved.recipe,), record.steps)
            yield from lint_check(subject)
        yield from _lint_condition(check, path, resolved)
        if check.waiver is not None:
            yield from lint_waiver(path, live, check.waiver, today)
        yield from _lint_minutes(check, path, record)
    yield from lint_margins(path.stem, checks, path.resolve().parent.parent)


def _lint_condition(check: DeclaredCheck, path: Path, resolved: ResolvedRecipe) -> Iterator[Finding]:
    """A condition on a key that no recipe has never holds."""
    if check.when is None:
        return
    key = check.when.partition("=")[0]
    keys = flatten(resolved.tree)
    if key not in keys:
        close = nearest_key(key, keys)
        hint = f"; did you mean {close}?" if close else ""
        yield error(path, check.line, "condition", f"--when {check.when}: recipes have no key {key}{hint}")


def _lint_minutes(check: DeclaredCheck, path: Path, record: DriverRecord) -> Iterator[Finding]:
    """A run that keeps to its step time must be able to end."""
    limit = step_time_limit(check.expression)
    needed = record.steps * limit / 60.0 + STARTUP_MINUTES if limit is not None else 0.0
    if needed > record.minutes:
        text = (
            f"minutes={record.minutes:g} is too few: {record.steps} steps of up to {limit:g} s and "
            f"{STARTUP_MINUTES:g} minutes to start need {needed:.4g}"
        )
        yield error(path, check.line, "minutes", text)


def _named_as_defaults(folder: Path) -> Iterator[Path]:
    """Every file that a recipe of the folder inherits from."""
    for path in folder.glob("*.yaml"):
        try:
            defaults = read_yaml(path).tree.get("defaults", [])
        except ConfigError:
            # That recipe has a finding of its own.
            continue
        names = [defaults] if isinstance(defaults, str) else defaults
        yield from ((folder / name).resolve() for name in names if isinstance(name, str))


def _sibling(path: Path, folder: str, suffix: str) -> Path:
    """The file of the same stem in a folder beside this file's own."""
    return path.resolve().parent.parent / folder / f"{path.stem}.{suffix}"


def _text(path: Path) -> str:
    """The driver's text; raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as caught:
        raise ConfigError(f"{path}: cannot be read: {caught}") from caught
