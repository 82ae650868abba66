# SPDX-License-Identifier: Apache-2.0
"""From the `external:` block of a suite to an external case."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.plan.external.dialect import Dialect, load_dialect
from lora_suite.plan.external.entry import ExternalEntry
from lora_suite.plan.external.reading import Reading, read_nemo_rl
from lora_suite.plan.facts import normalised
from lora_suite.plan.model import DeclaredCheck, ExternalCase

PYTHON = "{python}"
UNNAMED = "external"


@dataclass(frozen=True)
class Moved:
    """A suite that is a copy. suite: the file that it was copied from. source, folder: the tree that was
    copied, and where the copy lies; both None where an external case's folder was not copied with it.
    """

    suite: Path
    source: Path | None = None
    folder: Path | None = None

    def folder_of(self, cwd: str) -> Path:
        """An external case's folder: in the copy if it was copied, else where it always was."""
        found = (self.suite.resolve().parent / cwd).resolve()
        if self.source is None or self.folder is None or not found.is_relative_to(self.source):
            return found
        return self.folder / found.relative_to(self.source)


def load_external(
    suite: Path,
    stem: str,
    entry: ExternalEntry,
    checks: tuple[DeclaredCheck, ...],
    overrides: Sequence[str],
    moved: Moved | None = None,
) -> ExternalCase:
    """Resolve an external case without running or writing anything.

    checks: the suite's own, after those of the trainer's files. overrides: words that follow the command's.
    moved: where a suite that is a copy was copied from.
    Raises ConfigError for what the suite says wrongly and for outputs that do not lie inside cwd, and
    UnreadableError where the trainer's own files cannot be read.
    """
    where = f"{suite}: case {stem}"
    cwd = (moved or Moved(suite)).folder_of(entry.cwd)
    if not cwd.is_dir():
        raise ConfigError(f"{where}: cwd: there is no folder {cwd}; write it as seen from the suite's folder")
    dialect = load_dialect(entry.dialect, suite)
    command = tuple(sys.executable if word == PYTHON else word for word in entry.command)
    reading = _read(where, dialect, command, cwd, overrides)
    outputs = tuple(_inside(where, cwd, cwd / text) for text in entry.outputs)
    if not outputs and reading is not None:
        outputs = tuple(_inside(where, cwd, path) for path in reading.outputs)
    if not outputs:
        raise ConfigError(f"{where}: outputs are missing; list the files and folders that a run creates")
    metrics = _metrics(where, cwd, entry, reading, outputs)
    nodes = _whole(where, "nodes", entry.nodes, reading.nodes if reading else None, default=1)
    gpus = entry.gpus or _whole(where, "gpus", None, reading.gpus if reading else None)
    facts = _facts(where, entry, dialect, reading, nodes * gpus)
    tree: dict[str, object] = {
        "external": {"command": [*entry.command, *overrides], "cwd": entry.cwd, "dialect": dialect.name},
        "facts": facts,
    }
    if reading is not None and reading.recipe_tree is not None:
        tree["recipe"] = reading.recipe_tree
    return ExternalCase(
        stem=stem,
        tree=tree,
        overrides=tuple(overrides),
        steps=_whole(where, "steps", entry.steps, reading.steps if reading else None),
        minutes=_number(where, "minutes", entry.minutes, reading.minutes if reading else None),
        checks=(reading.checks if reading else ()) + checks,
        command=command,
        cwd=cwd,
        outputs=outputs,
        metrics=metrics,
        dialect=dialect,
        facts=facts,
        recipe_tree=reading.recipe_tree if reading else None,
        processes=nodes * gpus,
        declared_nodes=nodes,
        source=reading.source if reading else suite,
        left=reading.left if reading else (),
    )


def _read(
    where: str, dialect: Dialect, command: Sequence[str], cwd: Path, overrides: Sequence[str]
) -> Reading | None:
    """What the trainer's own files say, None under a dialect that reads none."""
    if dialect.reader is None:
        return None
    if not any(word.endswith(".sh") for word in command):
        raise ConfigError(f"{where}: no word of the command is a script (.sh), which {dialect.name} reads")
    return read_nemo_rl(command, cwd, overrides, dialect.trainer or UNNAMED)


def _metrics(
    where: str, cwd: Path, entry: ExternalEntry, reading: Reading | None, outputs: Sequence[Path]
) -> Path:
    """Where the metrics lie, relative to cwd; they must be among the outputs."""
    if entry.metrics is not None:
        path = cwd / entry.metrics
    elif reading is not None:
        path = reading.metrics
    else:
        raise ConfigError(f"{where}: metrics is missing; name the file or folder that a run leaves them in")
    metrics = _inside(where, cwd, path)
    if not any(metrics.is_relative_to(output) for output in outputs):
        listed = ", ".join(map(str, outputs))
        raise ConfigError(f"{where}: metrics {metrics} is in none of the outputs ({listed}); list it there")
    return metrics


def _inside(where: str, cwd: Path, path: Path) -> Path:
    """A path relative to cwd; ConfigError where it, or what a symlink makes of it, is not inside."""
    plain = Path(os.path.normpath(path))
    real = plain.resolve()
    if plain == cwd or not plain.is_relative_to(cwd):
        raise ConfigError(f"{where}: output {path} is not inside cwd {cwd}; a run may only write below it")
    if not real.is_relative_to(cwd):
        raise ConfigError(f"{where}: output {plain} leads out of cwd {cwd} by a symlink, to {real}")
    return plain.relative_to(cwd)


def _facts(
    where: str, entry: ExternalEntry, dialect: Dialect, reading: Reading | None, ranks: int
) -> dict[str, object]:
    """What both the suite and the trainer's files say; ConfigError where they contradict one another."""
    declared = normalised(entry.declares.facts())
    read = dict(reading.facts) if reading else {"trainer": dialect.trainer or UNNAMED}
    for name, value in declared.items():
        if name != "trainer" and read.get(name, value) != value:
            raise ConfigError(
                f"{where}: declares.{name} is {value!r}, but the recipe says {read[name]!r}; remove one"
            )
    return {**read, **declared, "ranks": ranks}


def _whole(where: str, key: str, said: int | None, read: int | None, default: int | None = None) -> int:
    """A whole number of the suite or of the trainer's files."""
    value = _number(where, key, said, read, default)
    return int(value)


def _number(
    where: str, key: str, said: float | None, read: float | None, default: float | None = None
) -> float:
    """A number that the suite or the trainer's files say, not both differently."""
    if said is not None and read is not None and said != read:
        raise ConfigError(
            f"{where}: {key} is {said:g}, but the script says {read:g}; remove it from the suite"
        )
    for value in (said, read, default):
        if value is not None:
            return value
    raise ConfigError(f"{where}: {key} is missing; write it in the external block")
