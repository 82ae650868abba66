# SPDX-License-Identifier: Apache-2.0
"""What a suite takes from the history, and gives to it."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from lora_suite.history.recording import NOT_TONIGHT, case_histories, pair_prior, priors, record
from lora_suite.history.store import Store
from lora_suite.plan.metric_names import STEP_TIME
from tests.history.folders import suite_run, verdict_of
from tests.history.helpers import RATIO, pair, run, session
from tests.judge.helpers import FULL, LORA, make_plan

CHECK = f"{RATIO} < 0.8"


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    with Store(tmp_path / "history.db", create=True) as opened:
        yield opened


def add_nights(store, nights, repeats=4, spread=0.005, **changes):
    """Nights of a pair whose level moves by 2 % and whose repeats scatter by `spread`."""
    generator = random.Random(5)
    for night in range(nights):
        level = math.log(0.7) + generator.gauss(0.0, 0.02)
        ratios = [math.exp(generator.gauss(level, spread)) for _ in range(repeats)]
        store.add(session(night, [run(night, 0.1)], [pair(ratios, **changes)]))


def test_the_prior_is_the_spread_of_repeats_around_their_night(store):
    add_nights(store, 40)
    prior = pair_prior(store, "fsdp2", CHECK)
    assert prior is not None
    assert prior.spread == pytest.approx(0.005, rel=0.2)
    assert prior.degrees == 12.0
    assert prior.source == "40 earlier nights of this pair"


def test_two_repeats_a_night_give_their_difference(store):
    logs = [0.004, -0.01, 0.002, 0.006, -0.003, 0.008, 0.001, -0.005, 0.007]
    for night, log in enumerate(logs):
        store.add(session(night, [run(night, 0.1)], [pair([0.7, 0.7 * math.exp(log)])]))
    prior = pair_prior(store, "fsdp2", CHECK)
    assert prior is not None
    by_hand = 1.4826 * statistics.median(abs(log) / math.sqrt(2) for log in logs)
    assert prior.spread == pytest.approx(by_hand)
    assert prior.degrees == 4.5


def test_one_bad_night_hardly_moves_the_prior(store):
    add_nights(store, 20)
    before = pair_prior(store, "fsdp2", CHECK)
    store.add(session(20, [run(20, 0.1)], [pair([0.7, 1.4, 0.5, 0.9])]))
    after = pair_prior(store, "fsdp2", CHECK)
    assert before is not None
    assert after is not None
    assert after.spread == pytest.approx(before.spread, rel=0.15)


def test_few_nights_single_repeats_and_equal_repeats_give_none(store):
    assert pair_prior(store, "fsdp2", CHECK) is None
    add_nights(store, 7)
    assert pair_prior(store, "fsdp2", CHECK) is None
    add_nights(store, 20, repeats=1, pair="single")
    assert pair_prior(store, "single", CHECK) is None
    add_nights(store, 30, spread=0.0, version="exact", pair="exact")
    assert pair_prior(store, "exact", CHECK) is None


def test_only_nights_of_the_latest_environment_count(store):
    add_nights(store, 20)
    store.add(session(20, [run(20, 0.1)], [pair([0.7, 0.7], environment="env-b")]))
    assert pair_prior(store, "fsdp2", CHECK) is None


def test_a_plan_gets_the_priors_of_its_checks(store):
    add_nights(store, 20)
    assert priors(store, make_plan()).keys() == {"fsdp2"}
    assert priors(store, make_plan())["fsdp2"].keys() == {CHECK}


def test_a_suite_run_has_the_history_of_its_cases_and_pairs(store, tmp_path):
    folder = suite_run(tmp_path)
    assert record(store, folder)
    assert not record(store, folder)
    histories = case_histories(store, verdict_of(folder))
    assert {(each.case, each.metric) for each in histories if each.metric == STEP_TIME} == {
        (FULL, STEP_TIME),
        (LORA, STEP_TIME),
    }
    assert ("fsdp2", RATIO) in {(each.case, each.metric) for each in histories}
    assert all(len(each.nights) == 1 and each.alert == "" for each in histories)


def test_a_case_that_was_not_measured_tonight_is_said_so(store, tmp_path):
    folder = suite_run(tmp_path)
    record(store, folder)
    tomorrow = verdict_of(folder).model_copy(update={"started": "2100-01-01T00:00:00+00:00"})
    assert {each.alert for each in case_histories(store, tomorrow)} == {NOT_TONIGHT}
