# SPDX-License-Identifier: Apache-2.0
"""The scripts and recipes of a repository, each file read once and nothing executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.plan.audit.finding import AuditFinding
from lora_suite.plan.external.commands import ShellText
from lora_suite.plan.external.recipe import opaque_recipe
from lora_suite.plan.external.script import SUITES, Script, parse_script
from lora_suite.plan.external.shell import parse_shell
from lora_suite.plan.lint.finding import from_config_error

# One of these makes a shell script one of the family.
_SIGNS = ("BEGIN CONFIG", "check_metrics")


class Repository:
    """What was read below a folder. problems: files that could not be read, as findings."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.scripts: list[Script] = []
        self.problems: list[AuditFinding] = []
        self._trees: dict[Path, dict[str, Any] | None] = {}
        self._sources: dict[Path, ShellText | None] = {}

    def shown(self, path: Path) -> Path:
        """A path as seen from the audited folder."""
        whole = path.resolve()
        return whole.relative_to(self.root) if whole.is_relative_to(self.root) else whole

    def add(self, path: Path) -> None:
        """Read one script and its recipe; what cannot be read becomes a finding."""
        try:
            script = parse_script(path)
        except ConfigError as error:
            self._note("unreadable-script", path, error)
            return
        self.scripts.append(script)
        self._trees[path] = self._read_recipe(script)

    def tree(self, script: Script) -> dict[str, Any] | None:
        """The script's recipe with the overrides that it gives, None where there is none to read."""
        return self._trees[script.path]

    def sourced(self, script: Script) -> Iterator[tuple[int, ShellText | None]]:
        """Each file that the script reads in: the line that does, and its content if that could be read."""
        for source in script.sources:
            if source.path is None or not source.path.is_file():
                yield source.line, None
                continue
            path = source.path.resolve()
            if path not in self._sources:
                try:
                    self._sources[path] = parse_shell(path, path.read_text(encoding="utf-8"))
                except (ConfigError, OSError, UnicodeDecodeError):
                    # What a file that is no plain bash does is not known, and nothing is said of it.
                    self._sources[path] = None
            yield source.line, self._sources[path]

    def _read_recipe(self, script: Script) -> dict[str, Any] | None:
        if script.recipe is None:
            return None
        if not script.recipe.is_file():
            shown = self.shown(script.recipe)
            self.problems.append(
                AuditFinding("missing-recipe", self.shown(script.path), 0, str(shown), f"there is no {shown}")
            )
            return None
        overrides = script.training.overrides if script.training is not None else ()
        try:
            return opaque_recipe(script.recipe, overrides)
        except ConfigError as error:
            self._note("unreadable-recipe", script.recipe, error)
            return None

    def _note(self, kind: str, path: Path, error: ConfigError) -> None:
        """Keep the first line of an error, once, at the file and line that it names."""
        first = from_config_error(error, path, kind)[0]
        message = first.message.replace(f"{self.root}/", "")
        finding = AuditFinding(kind, self.shown(first.file), first.line, message, message)
        if finding not in self.problems:
            self.problems.append(finding)


def read_repository(root: Path) -> Repository:
    """Read every script of the family below a folder; raises ConfigError where there is none."""
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder")
    repository = Repository(root)
    base = root / SUITES if (root / SUITES).is_dir() else root
    for path in sorted(base.rglob("*.sh")):
        if _is_of_the_family(path):
            repository.add(path)
    if not repository.scripts and not repository.problems:
        raise ConfigError(
            f"{root}: holds no script with a CONFIG block or a call of check_metrics, in {base} or below it"
        )
    return repository


def _is_of_the_family(path: Path) -> bool:
    text = path.read_bytes() if path.is_file() else b""
    return any(sign.encode() in text for sign in _SIGNS)
