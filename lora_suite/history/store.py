# SPDX-License-Identifier: Apache-2.0
"""The store: facts go in once, and come out as they went in.

Nothing is ever updated. A fact that is there already is left alone, so that importing is repeatable, and
parallel jobs may import the same artefacts. A session goes in whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lora_suite.config.errors import ConfigError
from lora_suite.history.blob import pack, unpack
from lora_suite.history.facts import AckFact, BaselineFact, PairFact, RunFact, SessionFact, Trace, now
from lora_suite.history.schema import connect

DEFAULT_PATH = Path(".lora-suite/history.db")


@dataclass(frozen=True)
class SessionRow:
    """One suite run in a list: its id, what it was, how it ended, how many runs it has."""

    id: str
    suite: str
    started: str
    exit_code: int
    runs: int
    folder: str


class Store:
    """An open history. Use it as a context manager; every method may raise ConfigError where SQLite fails."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._connection = connect(path, create=create)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def add(self, fact: SessionFact | BaselineFact | AckFact) -> bool:
        """Add a fact; return whether it is new."""
        with self._transaction():
            if isinstance(fact, SessionFact):
                return self._add_session(fact)
            if isinstance(fact, BaselineFact):
                row = fact.id, fact.name, fact.created, fact.model_dump_json()
                return self._insert("baseline", row)
            return self._insert("ack", (fact.id, fact.case, fact.metric, fact.model_dump_json()))

    def sessions(self) -> list[SessionRow]:
        """All suite runs, oldest first."""
        rows = self.query(
            "SELECT id, suite, started, exit_code, "
            "(SELECT count(*) FROM run WHERE session = session.id), folder FROM session ORDER BY started, id"
        )
        return [SessionRow(*row) for row in rows]

    def session(self, session: str) -> SessionFact:
        """One suite run by its id, or by a beginning of it that only one has; raises ConfigError."""
        found = self.query(
            "SELECT id, suite, name, started, seconds, exit_code, folder FROM session "
            "WHERE substr(id, 1, ?) = ?",
            (len(session), session),
        )
        if len(found) != 1:
            raise ConfigError(
                f"{self.path}: {len(found) or 'no'} suite runs have an id that begins with {session!r}: see "
                "`lora-suite history list`"
            )
        ((key, suite, name, started, seconds, exit_code, folder),) = found
        runs = list(self._runs(key))
        return SessionFact(
            suite=suite,
            name=name,
            started=started,
            seconds=seconds,
            exit_code=exit_code,
            folder=folder,
            runs=runs,
            pairs=list(self._effects(key)),
            environments={
                run.environment: self.environment(run.environment) for run in runs if run.environment
            },
        )

    def environment(self, key: str) -> dict[str, Any]:
        """The strict facts of an environment by its hash; empty where it is not known, as a pair's is not."""
        rows = self.query("SELECT strict FROM environment WHERE id = ?", (key,))
        return dict(json.loads(rows[0][0])) if rows else {}

    def acks(self, name: str, metric: str) -> list[AckFact]:
        """The answers to alerts of one case or pair and metric, oldest first."""
        rows = self.query("SELECT content FROM ack WHERE name = ? AND metric = ?", (name, metric))
        return _oldest_first(AckFact.model_validate_json(content) for (content,) in rows)

    def all_acks(self) -> list[AckFact]:
        """Every answer to an alert, oldest first."""
        return _oldest_first(
            AckFact.model_validate_json(content) for (content,) in self.query("SELECT content FROM ack")
        )

    def baselines(self) -> list[BaselineFact]:
        """Every baseline that was ever set, oldest first."""
        rows = self.query("SELECT content FROM baseline ORDER BY created, id")
        return [BaselineFact.model_validate_json(content) for (content,) in rows]

    def baseline(self, name: str) -> BaselineFact:
        """The baseline of that name that was set last; raises ConfigError."""
        named = [each for each in self.baselines() if each.name == name]
        if not named:
            raise ConfigError(
                f"{self.path}: no baseline {name!r}: set it with `lora-suite baseline set {name} RESULTS`"
            )
        return named[-1]

    def prune(self, keep_days: int) -> int:
        """Drop the traces of suite runs older than that; return how many went. All else stays."""
        oldest = (datetime.fromisoformat(now()) - timedelta(days=keep_days)).isoformat(timespec="seconds")
        with self._transaction():
            gone = self._execute(
                "DELETE FROM trace WHERE run IN (SELECT run.number FROM run JOIN session "
                "ON session.id = run.session WHERE session.started < ?)",
                (oldest,),
            ).rowcount
        self._execute("VACUUM")
        return gone

    def query(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows of a statement that reads."""
        return self._execute(statement, values).fetchall()

    def _add_session(self, fact: SessionFact) -> bool:
        key = fact.id
        row = key, fact.suite, fact.name, fact.started, fact.seconds, fact.exit_code, fact.folder
        if not self._insert("session", row):
            return False
        for environment, strict in fact.environments.items():
            self._insert("environment", (environment, json.dumps(strict, sort_keys=True)))
        for run in fact.runs:
            self._add_run(key, run)
        for pair in fact.pairs:
            content = pair.model_dump()
            content["ratios"] = json.dumps(pair.ratios)
            self._insert("effect", (key, *content.values()))
        return True

    def _add_run(self, session: str, run: RunFact) -> None:
        row = (
            *(session, run.case, run.repeat, run.pair, run.arm, run.run_id, run.started, run.version),
            *(run.environment, run.code, run.state, run.seconds, json.dumps(run.health)),
        )
        number = self._execute(f"INSERT INTO run VALUES (NULL, {_marks(row)})", row).lastrowid
        for metric, value in run.values.items():
            self._insert("summary", (number, metric, value))
        for metric, trace in run.traces.items():
            self._insert("trace", (number, metric, pack(trace)))

    def _runs(self, session: str) -> Iterator[RunFact]:
        rows = self.query(
            "SELECT number, name, repeat, pair, arm, run_id, started, version, environment, code, state, "
            "seconds, health FROM run WHERE session = ? ORDER BY number",
            (session,),
        )
        names = ("case", "repeat", "pair", "arm", "run_id", "started", "version", "environment", "code")
        for number, *row, state, seconds, health in rows:
            yield RunFact(
                **dict(zip(names, row, strict=True)),
                state=state,
                seconds=seconds,
                health=json.loads(health),
                values=dict(self.query("SELECT metric, value FROM summary WHERE run = ?", (number,))),
                traces=self._traces(number),
            )

    def _traces(self, run: int) -> dict[str, Trace]:
        rows = self.query("SELECT metric, points FROM trace WHERE run = ?", (run,))
        return {metric: unpack(points) for metric, points in rows}

    def _effects(self, session: str) -> Iterator[PairFact]:
        names = list(PairFact.model_fields)
        rows = self.query(
            f"SELECT {', '.join(names)} FROM effect WHERE session = ? ORDER BY pair, expression", (session,)
        )
        for row in rows:
            content = dict(zip(names, row, strict=True))
            yield PairFact(**{**content, "ratios": json.loads(content["ratios"])})

    def _insert(self, table: str, row: tuple[object, ...]) -> bool:
        """Insert a row unless its key is there already; return whether it is new."""
        done = self._execute(f"INSERT INTO {table} VALUES ({_marks(row)}) ON CONFLICT DO NOTHING", row)
        return done.rowcount == 1

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise ConfigError(f"{self.path}: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what is done inside, or nothing of it."""
        with self._connection:
            self._execute("BEGIN IMMEDIATE")
            yield


def _oldest_first(acks: Iterable[AckFact]) -> list[AckFact]:
    return sorted(acks, key=lambda ack: (ack.created, ack.id))


def _marks(row: tuple[object, ...]) -> str:
    return ", ".join("?" * len(row))
