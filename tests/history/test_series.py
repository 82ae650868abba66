# SPDX-License-Identifier: Apache-2.0
"""Which nights are comparable, and what a night's value is."""

from __future__ import annotations

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.history.series import load_series
from lora_suite.history.store import Store
from lora_suite.plan.metric_names import LOSS, STEP_TIME
from tests.history.helpers import CASE, RATIO, fill, pair, run, session, started


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    with Store(tmp_path / "history.db", create=True) as opened:
        yield opened


def test_a_night_is_the_median_of_its_repeats(store):
    store.add(session(0, [run(0, value, repeat=at + 1) for at, value in enumerate((0.1, 0.3, 0.2))]))
    (night,) = load_series(store, CASE).nights
    assert night.value == 0.2
    assert night.repeats == (0.1, 0.3, 0.2)
    assert (night.run_id, night.code, night.started) == ("run-0", "c0000", started(0))


def test_nights_are_in_the_order_of_time_whatever_that_of_import(store):
    for night in (2, 0, 1):
        store.add(session(night, [run(night, 0.1 + night)]))
    assert load_series(store, CASE).values == [0.1, 1.1, 2.1]


@pytest.mark.parametrize("other", [{"environment": "env-b"}, {"version": "recipe-b"}])
def test_another_environment_or_recipe_is_never_compared(store, other):
    fill(store, [0.1, 0.1, 0.1])
    store.add(session(3, [run(3, 0.2, **other)]))
    series = load_series(store, CASE)
    assert series.values == [0.2]
    assert [night.value for night in series.elsewhere] == [0.1, 0.1, 0.1]
    store.add(session(4, [run(4, 0.1)]))
    assert load_series(store, CASE).values == [0.1] * 4


def test_one_suite_run_on_two_machines_is_two_nights(store):
    store.add(session(0, [run(0, 0.1), run(0, 0.5, repeat=2, environment="env-b")]))
    series = load_series(store, CASE)
    assert series.values == [0.5]
    assert [night.value for night in series.elsewhere] == [0.1]


def test_runs_that_broke_are_no_nights_and_failed_checks_are(store):
    for night, state in enumerate(("PASS", "ERROR", "MISSING", "FAIL")):
        store.add(session(night, [run(night, 0.1 + night, state=state)]))
    assert load_series(store, CASE).values == [0.1, 3.1]


def test_an_unwell_machine_is_flagged_and_counts(store):
    fill(store, [0.1])
    store.add(session(1, [run(1, 0.2, health=["power cap"])]))
    assert [night.flagged for night in load_series(store, CASE).nights] == [False, True]


def test_a_pair_has_its_ratio(store):
    for night in range(3):
        store.add(session(night, [run(night, 0.1)], [pair([0.7, 0.8])]))
    series = load_series(store, "fsdp2")
    assert series.metric == RATIO
    assert series.values == pytest.approx([(0.7 * 0.8) ** 0.5] * 3)
    assert series.nights[0].repeats == (0.7, 0.8)
    assert series.nights[0].code == "c0000"
    assert series.policy.worse == 1


def test_of_a_ratio_that_is_to_be_large_less_is_worse(store):
    store.add(session(0, [run(0, 0.1)], [pair([1.4, 1.5], operator=">")]))
    assert load_series(store, "fsdp2").policy.worse == -1


def test_what_is_not_there_is_named_with_what_is(store):
    with pytest.raises(ConfigError, match="the history has nothing"):
        load_series(store, CASE)
    fill(store, [0.1])
    with pytest.raises(ConfigError, match=f"nobody has no {STEP_TIME}; the history has {CASE}"):
        load_series(store, "nobody")
    with pytest.raises(ConfigError, match=f"{CASE} has no {LOSS}; it has {STEP_TIME}"):
        load_series(store, CASE, LOSS)
