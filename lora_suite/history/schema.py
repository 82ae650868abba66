# SPDX-License-Identifier: Apache-2.0
"""The tables of the store, and opening a file that has them.

Write-ahead logging lets readers go on while one job writes; writers wait for each other. SQLite's own
`user_version` says which tables a file has: one of a newer release is refused rather than guessed at.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from lora_suite.config.errors import ConfigError

USER_VERSION = 1
_WAIT_SECONDS = 60.0

_TABLES = """
CREATE TABLE environment(
  id TEXT PRIMARY KEY,
  strict TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE session(
  id TEXT PRIMARY KEY,
  suite TEXT NOT NULL,
  name TEXT NOT NULL,
  started TEXT NOT NULL,
  seconds REAL NOT NULL,
  exit_code INTEGER NOT NULL,
  folder TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE run(
  number INTEGER PRIMARY KEY,
  session TEXT NOT NULL REFERENCES session,
  name TEXT NOT NULL,
  repeat INTEGER NOT NULL,
  pair TEXT,
  arm TEXT,
  run_id TEXT NOT NULL,
  started TEXT NOT NULL,
  version TEXT NOT NULL,
  environment TEXT NOT NULL,
  code TEXT NOT NULL,
  state TEXT NOT NULL,
  seconds REAL,
  health TEXT NOT NULL,
  UNIQUE(session, name, repeat));
CREATE INDEX run_name ON run(name);
CREATE TABLE summary(
  run INTEGER NOT NULL REFERENCES run,
  metric TEXT NOT NULL,
  value REAL NOT NULL,
  PRIMARY KEY(run, metric)) WITHOUT ROWID;
CREATE TABLE trace(
  run INTEGER NOT NULL REFERENCES run,
  metric TEXT NOT NULL,
  points BLOB NOT NULL,
  PRIMARY KEY(run, metric)) WITHOUT ROWID;
CREATE TABLE effect(
  session TEXT NOT NULL REFERENCES session,
  pair TEXT NOT NULL,
  expression TEXT NOT NULL,
  operator TEXT NOT NULL,
  version TEXT NOT NULL,
  environment TEXT NOT NULL,
  state TEXT NOT NULL,
  estimate REAL NOT NULL,
  low REAL NOT NULL,
  high REAL NOT NULL,
  ratios TEXT NOT NULL,
  PRIMARY KEY(session, pair, expression)) WITHOUT ROWID;
CREATE INDEX effect_pair ON effect(pair);
CREATE TABLE baseline(
  id TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  created TEXT NOT NULL,
  content TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE ack(
  id TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  metric TEXT NOT NULL,
  content TEXT NOT NULL) WITHOUT ROWID;
"""


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a store, make it where `create` allows that; raises ConfigError where it is none of ours."""
    if not create and not path.is_file():
        raise ConfigError(
            f"{path}: no history here: name it with --db, or make it with `lora-suite history import`"
        )
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
        _prepare(connection, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name another file with --db") from error
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be used as a history: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables where there are none. Processes that come at once make them once."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if _version(connection) == USER_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    found = _version(connection)
    if found == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in _TABLES.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {USER_VERSION}")
        found = USER_VERSION
    connection.execute("COMMIT")
    if found != USER_VERSION:
        raise ConfigError(
            f"{path}: its tables have version {found}, this release knows {USER_VERSION}: use another file "
            "(--db), and `lora-suite history import` the results into it"
        )


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
