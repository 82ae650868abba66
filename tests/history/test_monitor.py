# SPDX-License-Identifier: Apache-2.0
"""The nightly monitor on series whose answer is known."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy import stats

from lora_suite.history.metrics import PEAK_MEMORY, policy_of
from lora_suite.history.monitor import FEWEST_AFTER_CHANGE, FEWEST_NIGHTS, normal_score, watch
from lora_suite.plan.metric_names import LOSS, STEP_TIME
from tests.history.helpers import noisy

TIME = policy_of(STEP_TIME)
RATE = policy_of("performance/tokens_per_sec_per_gpu")


def alerts(values, policy=TIME, **options):
    """Night and signal of every alert."""
    return [
        (at, each) for at, each in enumerate(watch(values, policy, **options).signals) if each is not None
    ]


@pytest.mark.parametrize("degrees", [7, 12, 27, 59])
@pytest.mark.parametrize("t", [0.5, 2.0, 4.0, 8.0, -3.0])
def test_a_t_value_becomes_the_normal_deviate_that_is_as_rare(t, degrees):
    exact = math.copysign(stats.norm.isf(stats.t.sf(abs(t), degrees)), t)
    assert normal_score(t, degrees) == pytest.approx(exact, rel=0.02)


def test_the_chart_calls_what_its_formula_calls():
    values = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.8, 99.2, 100.0]
    logs = [math.log(value) for value in values]
    centre, middle = statistics.fmean(logs), statistics.median(logs)
    spread = math.sqrt(sum((log - centre) ** 2 for log in logs) / 9)

    def tonight(share):
        return [*values, math.exp(middle) * (1 + share)]

    # The smallest share whose t value is as rare as four normal deviations.
    rare = stats.t.isf(stats.norm.sf(4.0), 9)
    limit = math.expm1(rare * spread * math.sqrt(1.1))
    assert alerts(tonight(0.97 * limit)) == []
    ((night, signal),) = alerts(tonight(1.03 * limit))
    assert (night, signal.detector, signal.first, signal.worse) == (10, "chart", 10, True)
    assert signal.change == pytest.approx(1.03 * limit)


def test_nothing_is_judged_before_there_are_nights_enough():
    values = [*noisy(FEWEST_NIGHTS - 1), 0.2, 0.1, 0.1]
    assert watch(values, TIME).judged == [False] * FEWEST_NIGHTS + [True, True]


def test_a_step_is_named_at_its_first_night_and_stays_named():
    values = [*noisy(30), *noisy(40, seed=2, level=0.103)]
    found = alerts(values)
    assert [night for night, _ in found] == list(range(30, 70))
    assert {signal.first for night, signal in found if night >= 33} == {30}
    assert all(signal.worse for _, signal in found)
    assert found[-1][1].change == pytest.approx(0.03, abs=0.006)


def test_a_creep_never_becomes_its_own_reference():
    noise = noisy(220)
    values = [value * math.exp(0.0005 * max(0, at - 20)) for at, value in enumerate(noise)]
    assert alerts(values)[-1][0] == 219
    assert alerts(values)[-1][1].change == pytest.approx(0.1, abs=0.02)


def test_one_odd_night_is_an_alert_that_night_alone():
    values = noisy(60)
    values[40] *= 1.4
    assert [(night, signal.detector) for night, signal in alerts(values)] == [(40, "chart")]


def test_a_metric_that_never_moved_can_still_be_judged():
    assert alerts([12.5] * 30, policy_of(PEAK_MEMORY)) == []
    ((_, signal),) = alerts([*[12.5] * 30, 12.6], policy_of(PEAK_MEMORY))
    assert signal.worse
    assert signal.change == pytest.approx(0.008)


def test_a_change_that_is_too_small_to_speak_of_is_not_spoken_of():
    assert alerts([*[12.5] * 30, *[12.55] * 30], policy_of(PEAK_MEMORY)) == []


@pytest.mark.parametrize("factor", [0.5, 1000.0])
def test_the_unit_does_not_matter(factor):
    values = [*noisy(30), *noisy(20, seed=3, level=0.102)]
    scaled = alerts([factor * value for value in values])
    assert [(night, each.first) for night, each in scaled] == [
        (night, each.first) for night, each in alerts(values)
    ]
    assert scaled


def test_more_throughput_is_better_and_less_is_worse():
    slower = [*noisy(30), *noisy(6, seed=2, level=0.104)]
    rates = [1 / value for value in slower]
    assert [(night, each.first) for night, each in alerts(rates, RATE)] == [
        (night, each.first) for night, each in alerts(slower)
    ]
    assert all(each.worse and each.change < 0 for _, each in alerts(rates, RATE))


def test_of_a_loss_every_change_is_worse():
    steady = [2.0, 2.0001] * 10
    assert [each.worse for _, each in alerts([*steady, 1.98], policy_of(LOSS))] == [True]
    assert [each.worse for _, each in alerts([*steady, 2.02], policy_of(LOSS))] == [True]


def test_an_improvement_becomes_the_reference_and_its_loss_is_found():
    better = [*noisy(30), *noisy(30, seed=2, level=0.09)]
    watched = watch([*better, *noisy(10, seed=4, level=0.1)], TIME)
    assert watched.accepted == [30]
    assert not any(each is not None and each.worse for each in watched.signals[:60])
    assert watched.signals[59] is None
    last = watched.signals[-1]
    assert last is not None
    assert last.worse
    assert last.first == 60


def test_a_regression_never_becomes_the_reference():
    values = [*noisy(30), *noisy(300, seed=2, level=0.11)]
    watched = watch(values, TIME)
    assert watched.accepted == []
    assert watched.signals[-1] is not None


def test_after_an_acknowledged_change_the_spread_is_known_and_the_level_is_new():
    values = [*noisy(30), *noisy(FEWEST_AFTER_CHANGE, seed=2, level=0.11), 0.11, 0.12]
    watched = watch(values, TIME, starts={30})
    assert watched.signals[30:-1] == [None] * (FEWEST_AFTER_CHANGE + 1)
    assert watched.judged[30:] == [False] * FEWEST_AFTER_CHANGE + [True, True]
    last = watched.signals[-1]
    assert last is not None
    assert last.detector == "chart"


def test_nights_that_were_noise_are_not_judged_and_later_ones_are():
    values = noisy(50)
    values[40] *= 1.4
    values[49] *= 1.4
    assert [night for night, _ in alerts(values, dismissed={40: 40})] == [49]


def test_a_fixed_regression_ends_its_alert():
    values = [*noisy(30), *noisy(10, seed=2, level=0.105), *noisy(30, seed=3)]
    nights = [night for night, _ in alerts(values)]
    assert nights[:10] == list(range(30, 40))
    assert max(nights) <= 43
