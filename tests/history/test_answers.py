# SPDX-License-Identifier: Apache-2.0
"""Answers to open alerts, and the share that were false."""

from __future__ import annotations

from datetime import date

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.history.answers import Answer, acknowledge, false_alarms
from lora_suite.history.metrics import PEAK_MEMORY
from lora_suite.history.series import load_series
from lora_suite.history.store import Store
from lora_suite.history.trend import judge_series
from lora_suite.plan.metric_names import STEP_TIME
from tests.history.helpers import CASE, noisy, run, session, started

NOISE = Answer("noise", "a neighbour", "me", None)


@pytest.fixture
def store(tmp_path):
    """Twenty quiet nights, then one with a slow step and one block more of memory."""
    with Store(tmp_path / "history.db", create=True) as opened:
        for night, value in enumerate([*noisy(20), 0.2]):
            values = {STEP_TIME: value, PEAK_MEMORY: 12.5 if night < 20 else 13.0}
            opened.add(session(night, [run(night, value, values=values)]))
        yield opened


def state(store, metric=STEP_TIME):
    """What the trend says tonight."""
    return judge_series(load_series(store, CASE, metric), store.acks(CASE, metric)).state


def test_every_open_alert_of_a_case_is_answered(store):
    acks = acknowledge(store, CASE, NOISE)
    assert [(each.metric, each.started, each.run_id) for each in acks] == [
        (PEAK_MEMORY, started(20), "run-20"),
        (STEP_TIME, started(20), "run-20"),
    ]
    assert (state(store), state(store, PEAK_MEMORY)) == ("PASS", "PASS")


def test_a_metric_may_be_named(store):
    (ack,) = acknowledge(store, f"{CASE}:{STEP_TIME}", NOISE)
    assert ack.metric == STEP_TIME
    assert (state(store), state(store, PEAK_MEMORY)) == ("PASS", "FAIL")


def test_without_an_open_alert_there_is_nothing_to_answer(store):
    acknowledge(store, CASE, NOISE)
    with pytest.raises(ConfigError, match="no alert is open"):
        acknowledge(store, CASE, NOISE)
    with pytest.raises(ConfigError, match="the history has"):
        acknowledge(store, "nobody", NOISE)


def test_the_false_alarm_rate_counts_each_alert_once(store):
    assert str(false_alarms(store.all_acks())) == "no alert was answered yet"
    acknowledge(store, f"{CASE}:{STEP_TIME}", NOISE)
    acknowledge(store, CASE, Answer("real", "", "me", date(2100, 1, 1)))
    alarms = false_alarms(store.all_acks())
    assert (alarms.noise, alarms.answered) == (1, 2)
    assert str(alarms) == "of 2 alerts answered so far, 1 were noise (50 %)"
    (noise,) = (each for each in store.all_acks() if each.label == "noise")
    changed_mind = noise.model_copy(update={"label": "real"})
    assert false_alarms([*store.all_acks(), changed_mind]).noise == 0
