# SPDX-License-Identifier: Apache-2.0
"""A metric of a case, or a ratio of a pair, over the nights in which it may be compared.

Nights are comparable where the recipe (less names and paths) and the strict environment are the same. The
nights of the latest of these are the series; how many others there are is said, never compared.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.history.metrics import Policy, is_of_pair, policy_of
from lora_suite.history.store import Store
from lora_suite.judge.verdict import Night
from lora_suite.plan.metric_names import STEP_TIME

_RUNS = """
SELECT session.id, session.started, run.version, run.environment, run.run_id, run.code, run.health,
       summary.value
FROM run JOIN session ON session.id = run.session
JOIN summary ON summary.run = run.number AND summary.metric = ?
WHERE run.name = ? AND run.state NOT IN ('ERROR', 'MISSING')
ORDER BY session.started, session.id, run.version, run.environment, run.repeat
"""
_EFFECTS = """
SELECT session.id, session.started, effect.version, effect.environment, effect.operator, effect.estimate,
       effect.ratios, (SELECT max(code) FROM run WHERE run.session = session.id)
FROM effect JOIN session ON session.id = effect.session
WHERE effect.expression = ? AND effect.pair = ?
ORDER BY session.started, session.id
"""


@dataclass(frozen=True)
class SeriesNight:
    """One night of a series. value: the median of its repeats, or the pair's ratio. repeats: each of them.

    flagged: whether the machine was found unwell in one of its runs.
    """

    session: str
    started: str
    version: str
    environment: str
    value: float
    repeats: tuple[float, ...]
    run_id: str = ""
    code: str = ""
    flagged: bool = False

    @property
    def shown(self) -> Night:
        """As a report shows it."""
        return Night(started=self.started, value=self.value, run_id=self.run_id, code=self.code)


@dataclass(frozen=True)
class NightSeries:
    """Comparable nights, oldest first. elsewhere: those of that name with another recipe or environment."""

    name: str
    metric: str
    policy: Policy
    nights: list[SeriesNight]
    elsewhere: list[SeriesNight] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """The nights' values."""
        return [night.value for night in self.nights]

    @property
    def version(self) -> str:
        """Hash of the recipe of all its nights."""
        return self.nights[-1].version

    @property
    def environment(self) -> str:
        """Hash of the strict environment of all its nights."""
        return self.nights[-1].environment


def load_series(store: Store, name: str, metric: str = "") -> NightSeries:
    """The series of a case or pair, of its latest recipe and environment.

    metric: empty for a case's step time and a pair's first ratio. Raises ConfigError where there is no night,
    naming what there is.
    """
    metric = metric or _default_metric(store, name)
    nights, operator = _case_nights(store, name, metric), ""
    if is_of_pair(metric):
        nights, operator = _pair_nights(store, name, metric)
    if not nights:
        raise ConfigError(f"{store.path}: {name} has no {metric}; {_what_there_is(store, name)}")
    last = nights[-1]
    same = [each for each in nights if (each.version, each.environment) == (last.version, last.environment)]
    others = [each for each in nights if (each.version, each.environment) != (last.version, last.environment)]
    return NightSeries(name, metric, policy_of(metric, operator), same, others)


def metrics_of(store: Store, name: str) -> list[str]:
    """The metrics of a case that have at least one night."""
    rows = store.query(
        "SELECT DISTINCT metric FROM summary WHERE run IN (SELECT number FROM run WHERE name = ?) "
        "ORDER BY metric",
        (name,),
    )
    return [metric for (metric,) in rows]


def ratios_of(store: Store, pair: str) -> list[str]:
    """The ratios of a pair that have at least one night."""
    rows = store.query("SELECT DISTINCT expression FROM effect WHERE pair = ? ORDER BY expression", (pair,))
    return [expression for (expression,) in rows]


def _default_metric(store: Store, name: str) -> str:
    there = _series_of(store, name)
    return STEP_TIME if STEP_TIME in there or not there else there[0]


def _series_of(store: Store, name: str) -> list[str]:
    return [*metrics_of(store, name), *ratios_of(store, name)]


def _what_there_is(store: Store, name: str) -> str:
    there = _series_of(store, name)
    if there:
        return f"it has {', '.join(there)}"
    names = store.query("SELECT DISTINCT name FROM run UNION SELECT DISTINCT pair FROM effect ORDER BY 1")
    return f"the history has {', '.join(each for (each,) in names) or 'nothing'}"


def _case_nights(store: Store, name: str, metric: str) -> list[SeriesNight]:
    rows = store.query(_RUNS, (metric, name))
    return [_night(list(runs)) for _, runs in itertools.groupby(rows, key=lambda row: (row[0], *row[2:4]))]


def _night(rows: list[tuple[Any, ...]]) -> SeriesNight:
    session, started, version, environment, run_id, code, _, _ = rows[0]
    repeats = tuple(row[-1] for row in rows)
    return SeriesNight(
        session=session,
        started=started,
        version=version,
        environment=environment,
        value=statistics.median(repeats),
        repeats=repeats,
        run_id=run_id,
        code=code,
        flagged=any(json.loads(row[-2]) for row in rows),
    )


def _pair_nights(store: Store, name: str, expression: str) -> tuple[list[SeriesNight], str]:
    """A pair's nights, and the operator of its limit, which says what of a ratio is worse."""
    rows = store.query(_EFFECTS, (expression, name))
    return [_pair_night(row) for row in rows], rows[-1][4] if rows else ""


def _pair_night(row: tuple[Any, ...]) -> SeriesNight:
    session, started, version, environment, _, estimate, ratios, code = row
    return SeriesNight(
        session=session,
        started=started,
        version=version,
        environment=environment,
        value=estimate,
        repeats=tuple(json.loads(ratios)),
        code=code or "",
    )
