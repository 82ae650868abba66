# SPDX-License-Identifier: Apache-2.0
"""Kernels by name, what else differs, and the whole explanation of two runs."""

from __future__ import annotations

import pytest

from lora_suite.judge.explain import explain
from lora_suite.judge.explain.kernels import compare_profiles
from lora_suite.launch.record import FloorTerms
from lora_suite.launch.traces import Kind, Profile, Timed
from tests.judge.explain.sides import run, side


def timed(name: str, count: int, device_us: float, phase: str = "", kind: Kind = "kernel") -> Timed:
    on_device, on_host = (device_us, 1.0) if kind == "kernel" else (0.0, device_us)
    return Timed(kind=kind, name=name, phase=phase, count=count, device_us=on_device, host_us=on_host)


LEFT = Profile(
    steps=2,
    timed=[
        timed("gemm", 20, 4000.0, "forward_backward"),
        timed("triton_poi_fused_add_3", 4, 100.0, "optimizer"),
        timed("triton_poi_fused_add_11", 4, 60.0, "optimizer"),
        timed("aten::mm", 20, 500.0, "forward_backward", "operator"),
    ],
)
RIGHT = Profile(
    steps=3,
    timed=[
        timed("gemm", 30, 5400.0, "forward_backward"),
        timed("triton_poi_fused_add_4", 12, 3240.0, "optimizer"),
        timed("cast", 6, 300.0, "optimizer"),
        timed("aten::mm", 30, 900.0, "forward_backward", "operator"),
    ],
)


def test_kernels_are_compared_a_step_and_ranked_by_their_part_in_the_change() -> None:
    notes: list[str] = []
    found = compare_profiles(LEFT, RIGHT, 0.002, ("a", "b"), notes)
    rows = [(row.name, row.left_us, row.right_us, row.left_calls, row.right_calls) for row in found.kernels]
    # A step of the left had 80 µs of compiled adds, numbered otherwise than the right's 1080 µs.
    assert rows == [
        ("triton_poi_fused_add", 80.0, 1080.0, 4.0, 4.0),
        ("cast", None, 100.0, 0.0, 2.0),
        ("gemm", 2000.0, 1800.0, 10.0, 10.0),
    ]
    assert [row.share for row in found.kernels] == pytest.approx([0.5, 0.05, -0.1])
    assert [row.delta_us for row in found.operators] == [50.0]
    assert notes == []


def test_a_kernel_of_a_phase_is_not_one_of_another() -> None:
    left = Profile(steps=1, timed=[timed("gemm", 1, 5.0, "data"), timed("gemm", 1, 7.0, "optimizer")])
    right = Profile(steps=1, timed=[timed("gemm", 1, 9.0, "optimizer")])
    rows = {row.phase: row.delta_us for row in compare_profiles(left, right, None, ("a", "b"), []).kernels}
    assert rows == {"data": -5.0, "optimizer": 2.0}


def test_without_phases_on_one_side_kernels_are_compared_by_name_alone() -> None:
    notes: list[str] = []
    theirs = Profile(steps=0, timed=[timed("gemm", 10, 2500.0)])
    found = compare_profiles(LEFT, theirs, None, ("ours", "theirs"), notes)
    # Without a change to share out, the largest difference comes first.
    assert [(row.name, row.phase, row.delta_us) for row in found.kernels] == [
        ("gemm", "", 500.0),
        ("triton_poi_fused_add", "", -80.0),
    ]
    assert {row.share for row in found.kernels} == {None}
    assert notes == ["the trace of theirs has no marks of steps: all of it is taken as one step"]


FAULTY = {"debug": {"faults": {"slow_phase": {"optimizer": 0.03}}}, "policy": {"dim": 8}}
SOUND = {"debug": {"faults": {"slow_phase": {"optimizer": 0.0}}}, "policy": {"dim": 16}}


def test_everything_is_told_and_the_most_telling_comes_first() -> None:
    left = run(
        {"optimizer": 0.2, "forward_backward": 0.8},
        recipe=SOUND,
        strict={"torch": "2.11.0+cu128", "device": "H200", "threads": 8, "driver": "570.1"},
        soft={"code": "abc", "host": "one", "triton": None, "peft": "0.17.1"},
    )
    right = run(
        {"optimizer": 0.23, "forward_backward": 0.8},
        recipe=FAULTY,
        strict={"torch": "2.13.0+cu130", "device": "H100", "threads": 8, "driver": "570.1"},
        soft={"code": "def+", "host": "two", "triton": "3.6.0", "peft": "0.17.1"},
    )
    found = explain(side("a", left, profile=LEFT), side("b", right, profile=RIGHT))
    assert found.changed
    assert found.phases[0].phase == "optimizer"
    assert [(each.what, each.key, each.left, each.right) for each in found.unlike] == [
        ("fault", "debug.faults.slow_phase.optimizer", "0.0", "0.03"),
        ("code", "code", "abc", "def+"),
        ("package", "torch", "2.11.0+cu128", "2.13.0+cu130"),
        ("package", "triton", "None", "3.6.0"),
        ("machine", "device", "H200", "H100"),
        ("machine", "host", "one", "two"),
        ("configuration", "policy.dim", "16", "8"),
    ]
    assert found.kernels[0].share == pytest.approx(1000e-6 / 0.03)
    assert any("a side has one run" in note for note in found.notes)
    assert (found.left.steps, found.left.directories) == (16, ["a/1"])


def test_a_side_that_was_not_profiled_is_named() -> None:
    one, other = side("full", run({"data": 1.0}), profile=LEFT), side("lora", run({"data": 1.2}))
    assert "no kernels: lora was not profiled (--profile)" in explain(one, other).notes
    assert "no kernels: lora was not profiled (--profile)" in explain(other, one).notes
    assert not any("profiled" in note for note in explain(other, other).notes)


def test_a_side_says_how_far_its_step_is_from_the_floor() -> None:
    near = run({"data": 1.0}, more={"performance/floor_ratio": lambda step: 9.0 if step == 1 else 2.5})
    near.record.floor = FloorTerms(
        arithmetic=0.1, memory=0.4, communication=0.0, update=0.0, bound_by="memory"
    )
    found = explain(side("a", near), side("b", run({"data": 1.0})))
    assert (found.left.over_floor, found.left.floor_bound) == (2.5, "memory")
    assert (found.right.over_floor, found.right.floor_bound) == (None, "")


def test_kernels_of_a_step_are_counted_without_operators() -> None:
    found = explain(side("a", run({"data": 1.0}), profile=LEFT), side("b", run({"data": 1.2}), profile=RIGHT))
    # 28 in two steps, 48 in three.
    assert (found.left.kernels_per_step, found.right.kernels_per_step) == (14.0, 16.0)
    alone = explain(
        side("a", run({"data": 1.0})),
        side("b", run({"data": 1.2}), profile=Profile(steps=0, timed=LEFT.timed)),
    )
    assert (alone.left.kernels_per_step, alone.right.kernels_per_step) == (None, 28.0)


def test_records_without_an_environment_say_nothing_of_it() -> None:
    bare = run({"data": 1.0})
    bare.record.environment = None
    assert explain(side("a", bare), side("b", bare)).unlike == []
