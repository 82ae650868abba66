# SPDX-License-Identifier: Apache-2.0
"""Tonight's answer, the first bad run with its commits, and what acks do to it."""

from __future__ import annotations

from datetime import date

import pytest

from lora_suite.history.facts import AckFact
from lora_suite.history.trend import judge_series
from lora_suite.plan.metric_names import STEP_TIME
from tests.history.helpers import CASE, noisy, series, started

TODAY = date(2026, 3, 1)
STEP = [*noisy(30), *noisy(20, seed=2, level=0.105)]


def ack(label: str, first: int, last: int, **changes) -> AckFact:
    """An answer to the alert that began at night `first`."""
    facts = {
        "case": CASE,
        "metric": STEP_TIME,
        "environment": "env-a",
        "version": "recipe-a",
        "run_id": f"run-{first}",
        "started": started(first),
        "last": started(last),
        "label": label,
        "note": "",
        "by": "me",
        "created": started(last),
    }
    return AckFact(**facts | changes)


def own_series(values):
    """A series in the environment that the acks name."""
    found = series(values)
    nights = [type(night)(**{**vars(night), "environment": "env-a"}) for night in found.nights]
    return type(found)(found.name, found.metric, found.policy, nights)


def test_the_first_bad_run_is_named_with_its_commit_range():
    trend = judge_series(series(STEP), today=TODAY)
    assert trend.state == "FAIL"
    assert trend.tonight is not None
    assert trend.tonight.at == 30
    assert (trend.tonight.first_bad.run_id, trend.tonight.first_bad.code) == ("run-30", "c0030")
    assert (trend.tonight.last_good.run_id, trend.tonight.last_good.code) == ("run-29", "c0029")
    assert trend.tonight.ratio == pytest.approx(1.05, abs=0.006)
    assert trend.tonight.detectors == ["levels", "cusum"]
    assert "above the accepted level, for 20 nights" in trend.message


def test_a_change_of_few_nights_is_tentative():
    trend = judge_series(series(STEP[:33]), today=TODAY)
    assert trend.tonight is not None
    assert (trend.tonight.at, trend.tonight.detectors) == (30, ["cusum", "tentative"])


def test_a_steady_series_passes_and_a_short_one_is_not_judged():
    steady = judge_series(series(noisy(40)), today=TODAY)
    assert (steady.state, steady.signal, steady.changes, steady.message) == ("PASS", None, [], "")
    short = judge_series(series(noisy(9)), today=TODAY)
    assert short.state == "INCONCLUSIVE"
    assert "9 comparable nights, and 10 are needed" in short.message


def test_an_improvement_passes_and_is_shown():
    trend = judge_series(series([*noisy(30), *noisy(20, seed=2, level=0.095)]), today=TODAY)
    assert trend.state == "PASS"
    assert [change.at for change in trend.changes] == [30]
    assert trend.changes[0].ratio == pytest.approx(0.95, abs=0.006)


@pytest.mark.parametrize("label", ["real", "expected"])
def test_an_acknowledged_change_begins_a_new_level(label):
    trend = judge_series(own_series(STEP), [ack(label, 30, 33)], TODAY)
    assert trend.state == "PASS"
    assert [change.at for change in trend.changes] == [30]
    later = judge_series(own_series([*STEP, *noisy(6, seed=3, level=0.109)]), [ack(label, 30, 33)], TODAY)
    assert later.state == "FAIL"
    assert later.tonight is not None
    assert later.tonight.at == 50


def test_the_night_that_was_acknowledged_passes_and_the_next_is_too_early():
    answered = judge_series(own_series(STEP[:33]), [ack("real", 30, 32)], TODAY)
    assert answered.state == "PASS"
    assert judge_series(own_series(STEP[:34]), [ack("real", 30, 32)], TODAY).state == "INCONCLUSIVE"


def test_noise_is_accepted_and_hides_nothing_later():
    values = noisy(50)
    values[40] *= 1.3
    assert judge_series(own_series(values[:41]), [], TODAY).state == "FAIL"
    assert judge_series(own_series(values[:41]), [ack("noise", 40, 40)], TODAY).state == "PASS"
    values[49] *= 1.3
    assert judge_series(own_series(values), [ack("noise", 40, 40)], TODAY).state == "FAIL"


@pytest.mark.parametrize(("until", "state"), [(date(2026, 3, 1), "PASS"), (date(2026, 2, 28), "FAIL")])
def test_an_ack_counts_until_its_last_day_and_no_longer(until, state):
    trend = judge_series(own_series(STEP), [ack("real", 30, 49, until=until)], TODAY)
    assert trend.state == state
    assert len(trend.answered) == (state == "PASS")
    assert len(trend.expired) == (state == "FAIL")


@pytest.mark.parametrize("other", [{"environment": "env-b"}, {"version": "recipe-b"}])
def test_an_ack_of_another_environment_or_recipe_hides_nothing(other):
    assert judge_series(own_series(STEP), [ack("real", 30, 49, **other)], TODAY).state == "FAIL"


def test_a_report_shows_the_last_nights_and_the_changes_among_them():
    trend = judge_series(series(STEP), today=TODAY)
    shown = trend.history(25)
    assert [night.run_id for night in shown.nights] == [f"run-{at}" for at in range(25, 50)]
    assert [change.at for change in shown.changes] == [5]
    assert shown.nights[5] == shown.changes[0].first_bad
    assert shown.alert == trend.message
    assert trend.history(20).changes[0].at == 0
    assert trend.history(19).changes == []
    assert trend.history().nights[0].run_id == "run-0"
