# SPDX-License-Identifier: Apache-2.0
"""What a suite takes from the history before it runs, and gives to it afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.history.artefacts import read_session, series_name
from lora_suite.history.facts import utc
from lora_suite.history.metrics import PEAK_MEMORY
from lora_suite.history.series import SeriesNight, load_series, metrics_of, ratios_of
from lora_suite.history.store import Store
from lora_suite.history.trend import Trend, judge_series
from lora_suite.judge.statistics import MOST_DEGREES, Prior, contrasts, robust_prior
from lora_suite.judge.verdict import CaseHistory, SuiteVerdict
from lora_suite.plan.metric_names import LOSS, STEP_TIME
from lora_suite.plan.model import Plan

PRIOR_NIGHTS = 40
FEWEST_PRIOR_NIGHTS = 8
SHOWN_METRICS = (STEP_TIME, PEAK_MEMORY, LOSS)
NOT_TONIGHT = "not measured tonight"


def record(store: Store, results: Path) -> bool:
    """Add a suite run by its folder; return whether it is new. Raises ConfigError."""
    return store.add(read_session(results))


def case_histories(store: Store, verdict: SuiteVerdict, last: int = 30) -> list[CaseHistory]:
    """The last nights of every case and pair of a suite run that was recorded, judged as of tonight."""
    histories = []
    for trend in suite_trends(store, verdict):
        history = trend.history(last)
        if trend.series.nights[-1].started != utc(verdict.started):
            history = history.model_copy(update={"alert": NOT_TONIGHT})
        histories.append(history)
    return histories


def suite_trends(store: Store, verdict: SuiteVerdict) -> Iterator[Trend]:
    """Judge each series of a suite run's cases (time, memory, loss) and pairs (every ratio)."""
    for case in dict.fromkeys(run.case for run in verdict.runs):
        there = metrics_of(store, case)
        yield from _trends(store, case, [metric for metric in SHOWN_METRICS if metric in there])
    for pair in verdict.pairs:
        yield from _trends(store, pair.name, ratios_of(store, pair.name))


def priors(store: Store, plan: Plan) -> dict[str, dict[str, Prior]]:
    """What earlier nights say of the spread of the ratios of a plan's pairs, by pair and by check."""
    found: dict[str, dict[str, Prior]] = {}
    for pair in plan.pairs:
        for check in pair.checks:
            prior = pair_prior(store, pair.name, check)
            if prior is not None:
                found.setdefault(pair.name, {})[check] = prior
    return found


def pair_prior(store: Store, pair: str, check: str) -> Prior | None:
    """The prior of one check, None where fewer than 8 comparable nights with two repeats or more are known.

    The spread is that of the repeats around their own night, which a night that was odd as a whole does not
    widen: 1.4826 · median |d| over the contrasts of the last 40 nights. It is worth half as many degrees of
    freedom as there are nights, and no more than 12.
    """
    try:
        nights = load_series(store, pair, series_name(check)).nights
    except ConfigError:
        return None
    usable = [night for night in nights if len(night.repeats) > 1][-PRIOR_NIGHTS:]
    if len(usable) < FEWEST_PRIOR_NIGHTS:
        return None
    differences = [each for night in usable for each in contrasts(_logs(night))]
    try:
        prior = robust_prior(differences, f"{len(usable)} earlier nights of this pair")
    except ValueError:
        # Repeats that were always equal: no spread to reckon with.
        return None
    return replace(prior, degrees=min(MOST_DEGREES, len(usable) / 2))


def _logs(night: SeriesNight) -> list[float]:
    return [math.log(ratio) for ratio in night.repeats]


def _trends(store: Store, name: str, metrics: Iterable[str]) -> Iterator[Trend]:
    for metric in metrics:
        yield judge_series(load_series(store, name, metric), store.acks(name, metric))
