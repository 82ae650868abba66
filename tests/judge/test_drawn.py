# SPDX-License-Identifier: Apache-2.0
"""What reports draw: medians of phases, and thinned series that still show what happened."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from check_metrics import Series
from lora_suite.judge.drawn import MOST_POINTS, drawn_series, phases, thinned
from lora_suite.judge.evidence import Evidence, read_evidence
from tests.judge.helpers import make_case, per_step, write_run


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    def add(metrics: dict[str, Any], record: dict[str, Any]) -> None:
        metrics["timing/train/data"] = per_step(lambda step: 0.01)
        metrics["timing/train/optimizer"] = per_step(lambda step: 9.0 if step <= 3 else 0.02 + step / 1000)
        metrics["timing/train/checkpointing"] = per_step(lambda step: 0.0)
        metrics["ray/node.0.gpu.0.mem_gb"] = {"0": 1.0, "7": 2.0}
        metrics["train/loss"]["4"] = None

    return read_evidence(write_run(tmp_path, make_case(), damage=add))


def test_phases_are_medians_after_warm_up(evidence: Evidence) -> None:
    """Steps 4 to 10 of the optimizer: 24 to 30 ms, the middle one is 27."""
    assert phases(evidence, 3) == {"data": pytest.approx(0.01), "optimizer": pytest.approx(0.027)}


def test_series_are_those_that_reports_draw(evidence: Evidence) -> None:
    drawn = drawn_series(evidence)
    assert set(drawn) == {
        "train/loss",
        "validation/loss",
        "timing/train/step_time",
        "timing/train/data",
        "timing/train/optimizer",
        "ray/node.0.gpu.0.mem_gb",
    }
    assert drawn["ray/node.0.gpu.0.mem_gb"].at == [0.0, 7.0]
    # A value that is not finite cannot be drawn.
    assert drawn["train/loss"].at == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_without_devices_the_peak_so_far_is_drawn(tmp_path: Path) -> None:
    def add(metrics: dict[str, Any], record: dict[str, Any]) -> None:
        metrics["memory/peak_allocated_gib"] = per_step(lambda step: 1.0 + step)

    drawn = drawn_series(read_evidence(write_run(tmp_path, make_case(), damage=add)))
    assert drawn["memory/peak_allocated_gib"].values == [2.0 + step for step in range(10)]


def series(values: list[float]) -> Series:
    return Series("x", tuple(range(1, len(values) + 1)), tuple(values))


def test_a_short_series_is_drawn_whole() -> None:
    values = [1.0 + step for step in range(MOST_POINTS)]
    assert thinned(series(values)).values == values


def test_a_long_series_keeps_its_ends_and_every_spike() -> None:
    values = [1.0 + step * 1e-4 for step in range(10_000)]
    spikes = {1234: 50.0, 5000: 0.01, 9998: 70.0}
    for step, value in spikes.items():
        values[step - 1] = value
    points = thinned(series(values))
    assert len(points.at) <= MOST_POINTS
    assert points.at == sorted(set(points.at))
    assert (points.at[0], points.at[-1]) == (1, 10_000)
    found = dict(zip(points.at, points.values, strict=True))
    assert {step: found[step] for step in spikes} == spikes


def test_an_even_series_is_not_drawn_twice() -> None:
    points = thinned(series([2.0] * 5000))
    assert len(points.at) == len(set(points.at))
    assert set(points.values) == {2.0}


def test_digits_are_those_that_a_curve_shows() -> None:
    assert thinned(series([math.pi, 1e-9 * math.pi])).values == [3.14159, 3.14159e-09]
