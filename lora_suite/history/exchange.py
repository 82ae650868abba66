# SPDX-License-Identifier: Apache-2.0
"""Facts in and out: from folders of results, and as JSON lines that another store reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.history.artefacts import VERDICT, read_session
from lora_suite.history.facts import AckFact, BaselineFact, SessionFact
from lora_suite.history.store import Store

_LINES = ".jsonl"
_Fact = SessionFact | BaselineFact | AckFact
_ADAPTER: TypeAdapter[_Fact] = TypeAdapter(Annotated[_Fact, Field(discriminator="kind")])


@dataclass
class Imported:
    """What an import did. new, known: facts added, and facts there already. problems: what was not read."""

    new: int = 0
    known: int = 0
    problems: list[str] = field(default_factory=list)


def import_paths(store: Store, paths: Sequence[Path]) -> Imported:
    """Add everything that paths hold: folders of suite runs, folders above such, exports (`*.jsonl`).

    What is damaged stops nothing else, and is named. Raises ConfigError for a path that holds nothing at all.
    """
    done = Imported()
    for path in paths:
        for source in _sources(path):
            _import(store, source, done)
    return done


def export_lines(store: Store) -> Iterator[str]:
    """Every fact as a line of JSON: suite runs, baselines, acks, each oldest first."""
    for row in store.sessions():
        yield store.session(row.id).model_dump_json()
    for fact in (*store.baselines(), *store.all_acks()):
        yield fact.model_dump_json()


def _sources(path: Path) -> list[Path]:
    """The exports and verdicts that a path means."""
    if path.is_file():
        return [path]
    found = [path / VERDICT] if (path / VERDICT).is_file() else sorted(path.rglob(VERDICT))
    if not found:
        raise ConfigError(
            f"{path}: no suite run here (no {VERDICT}): name a folder of results or an export ({_LINES})"
        )
    return found


def _import(store: Store, source: Path, done: Imported) -> None:
    try:
        for fact in _facts(source):
            if store.add(fact):
                done.new += 1
            else:
                done.known += 1
    except ConfigError as error:
        done.problems.append(str(error))


def _facts(source: Path) -> Iterator[_Fact]:
    if source.name == VERDICT:
        yield read_session(source.parent)
        return
    if source.suffix != _LINES:
        raise ConfigError(f"{source}: neither {VERDICT} nor an export ({_LINES})")
    try:
        with source.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                yield _parsed(source, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error


def _parsed(source: Path, number: int, line: str) -> _Fact:
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: line {number}: {place}: {first['msg']}") from error
