# SPDX-License-Identifier: Apache-2.0
"""Answers to alerts, and how many of the alerts were false."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date

from lora_suite.config.errors import ConfigError
from lora_suite.history.facts import AckFact, Label, now
from lora_suite.history.series import load_series, metrics_of, ratios_of
from lora_suite.history.store import Store
from lora_suite.history.trend import Trend, judge_series


@dataclass(frozen=True)
class Answer:
    """What is said of an alert: its label, why, by whom, and the last day on which that counts."""

    label: Label
    note: str
    by: str
    until: date | None


@dataclass(frozen=True)
class FalseAlarms:
    """How many alerts were answered, and how many of them as noise."""

    noise: int
    answered: int

    def __str__(self) -> str:
        """As people read it."""
        if not self.answered:
            return "no alert was answered yet"
        share = f"{100 * self.noise / self.answered:.0f} %"
        return f"of {self.answered} alerts answered so far, {self.noise} were noise ({share})"


def acknowledge(store: Store, target: str, answer: Answer) -> list[AckFact]:
    """Answer the open alerts of `CASE`, or of `CASE:METRIC`; return what was added.

    Raises ConfigError where no alert is open: an answer to nothing would hide what comes later.
    """
    name, _, metric = target.partition(":")
    there = [*metrics_of(store, name), *ratios_of(store, name)]
    metrics = [metric] if metric or not there else there
    alerted = [
        trend
        for each in metrics
        if (trend := judge_series(load_series(store, name, each), store.acks(name, each))).signal is not None
    ]
    if not alerted:
        raise ConfigError(f"{target}: no alert is open, so there is nothing to acknowledge")
    acks = [_ack(trend, answer) for trend in alerted]
    for ack in acks:
        store.add(ack)
    return acks


def false_alarms(acks: Iterable[AckFact]) -> FalseAlarms:
    """The share of answered alerts that were noise; several answers to one alert are one, the last."""
    last = {(ack.case, ack.metric, ack.environment, ack.started): ack for ack in acks}
    return FalseAlarms(sum(ack.label == "noise" for ack in last.values()), len(last))


def _ack(trend: Trend, answer: Answer) -> AckFact:
    series = trend.series
    assert trend.tonight is not None
    first = series.nights[trend.tonight.at]
    return AckFact(
        case=series.name,
        metric=series.metric,
        environment=series.environment,
        version=series.version,
        run_id=first.run_id,
        started=first.started,
        last=series.nights[-1].started,
        label=answer.label,
        note=answer.note,
        by=answer.by,
        created=now(),
        until=answer.until,
    )
