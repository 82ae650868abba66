# SPDX-License-Identifier: Apache-2.0
"""Change points of whole series: against another library, and on a series whose points are known."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
import ruptures

from lora_suite.history.levels import FEWEST_ON_A_LEVEL, change_points, partition
from lora_suite.history.metrics import policy_of
from lora_suite.plan.metric_names import STEP_TIME
from tests.history.helpers import noisy

DATA = Path(os.environ.get("LORA_SUITE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
KNOWN = DATA / "tigerbeetle_throughput.json"
TIME = policy_of(STEP_TIME)


@pytest.mark.parametrize("seed", range(20))
def test_the_partition_is_the_cheapest_that_another_library_finds(seed):
    numpy = pytest.importorskip("numpy")
    generator = random.Random(seed)
    levels = [generator.gauss(0.0, 2.0) for _ in range(generator.randrange(1, 6))]
    values = [
        level + generator.gauss(0.0, 1.0) for level in levels for _ in range(generator.randrange(5, 25))
    ]
    penalty = generator.uniform(2.0, 12.0)
    theirs = ruptures.Pelt(model="l2", min_size=FEWEST_ON_A_LEVEL, jump=1).fit(numpy.array(values))
    assert partition(values, penalty) == theirs.predict(pen=penalty)[:-1]


def test_a_step_is_found_where_it_is():
    assert change_points([*noisy(30), *noisy(30, seed=2, level=0.102)], TIME) == [30]


def test_steps_of_either_direction_are_found():
    values = [*noisy(20), *noisy(20, seed=2, level=0.104), *noisy(20, seed=3, level=0.098)]
    assert change_points(values, TIME) == [20, 40]


def test_single_odd_nights_are_no_levels():
    values = noisy(60)
    for at in (7, 8, 30, 59):
        values[at] *= 1.5
    assert change_points(values, TIME) == []


def test_a_level_that_hardly_differs_is_none():
    assert change_points([*[0.1] * 30, *[0.1009] * 30], TIME) == []
    assert change_points([*[0.1] * 30, *[0.1011] * 30], TIME) == [30]


def test_fewer_nights_than_two_levels_have_no_change():
    assert change_points([0.1] * 5 + [0.2] * 4, TIME) == []
    assert change_points([0.1] * 5 + [0.2] * 5, TIME) == [5]


def test_the_unit_does_not_matter():
    values = [*noisy(25), *noisy(25, seed=2, level=0.105)]
    assert change_points([math.pi * value for value in values], TIME) == change_points(values, TIME) == [25]


@pytest.mark.skipif(not KNOWN.is_file(), reason="no recorded series here")
def test_known_change_points_of_a_recorded_series():
    """Nightly throughput of TigerBeetle, from the tests of apache/otava (Apache-2.0)."""
    found = change_points(json.loads(KNOWN.read_text())["values"], policy_of("performance/x"))
    assert {15, 71} <= set(found)
    assert len(found) <= 7
