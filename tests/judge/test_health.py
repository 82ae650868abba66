# SPDX-License-Identifier: Apache-2.0
"""Flags of a run's machine; bits as nvml.h has them (nvmlClocksEventReason*)."""

from __future__ import annotations

from typing import Any

import pytest

from lora_suite.judge.health import health_flags
from lora_suite.launch.record import Environment, RunRecord


def flags(health: dict[str, Any], cpus: int | None = 8) -> list[str]:
    """The flags of a run with this health."""
    environment = Environment(strict={}, soft={"cpus": cpus}) if cpus is not None else None
    return health_flags(
        RunRecord(
            run_id="r",
            case="c",
            started="",
            recipe={},
            recipe_hash="",
            health=health,
            environment=environment,
        )
    )


def gpu(**changes: Any) -> dict[str, Any]:
    """A GPU that was watched and had no trouble."""
    quiet = {"node": 0, "gpu": 0, "samples": 40, "throttled": {}, "others": 0, "other_pids": []}
    return quiet | changes


def test_a_run_without_trouble_or_without_health_has_none() -> None:
    assert flags({}) == []
    assert flags({"during": [gpu()], "before": {"load_average": [8.0, 1, 1], "gpus": []}}) == []


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        (0x4, "power cap"),
        (0x8, "hardware slowdown"),
        (0x20, "heat (driver)"),
        (0x40, "heat (hardware)"),
        (0x80, "power brake"),
    ],
)
def test_throttling_is_named_with_how_often(bit: int, name: str) -> None:
    seen = [gpu(throttled={str(bit): 12})]
    assert flags({"during": seen}) == [f"GPU 0 throttled: {name} during 12 of 40 samples"]


@pytest.mark.parametrize("bit", [0x1, 0x2, 0x10, 0x100])
def test_idle_application_clocks_boost_and_display_are_no_trouble(bit: int) -> None:
    assert flags({"during": [gpu(throttled={str(bit): 40})]}) == []
    assert flags({"after": {"gpus": [{"throttle_reasons": bit}]}}) == []


def test_a_run_that_was_not_watched_has_its_looks_before_and_after() -> None:
    looks = {
        "before": {"gpus": [{"throttle_reasons": 0x21}, {"throttle_reasons": None}]},
        "after": {"gpus": [{"throttle_reasons": 0x20}, {"throttle_reasons": 0x4}]},
    }
    assert flags(looks) == [
        "GPU 0 throttled: heat (driver) in 2 of 2 looks before and after",
        "GPU 1 throttled: power cap in 1 of 2 looks before and after",
    ]


def test_another_process_is_named_where_it_can_be() -> None:
    assert flags({"during": [gpu(others=2, other_pids=[123, 456])]}) == [
        "another process on GPU 0: pid 123, 456"
    ]
    assert flags({"during": [gpu(others=1)]}) == ["another process on GPU 0 (1 besides this run's)"]
    assert flags({"during": [gpu(others=-1)]}) == []


def test_gpus_of_further_nodes_say_their_node() -> None:
    seen = [gpu(node=1, gpu=3, throttled={"4": 1})]
    assert flags({"during": seen}) == ["node 1 GPU 3 throttled: power cap during 1 of 40 samples"]


def test_more_load_than_cores_is_a_flag() -> None:
    health = {"before": {"load_average": [1.0, 9, 9]}, "after": {"load_average": [8.26, 1, 1]}}
    assert flags(health) == ["load average 8.3 on 8 cores"]
    assert flags(health, cpus=None) == []
