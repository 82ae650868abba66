# SPDX-License-Identifier: Apache-2.0
"""A few steps more under torch's profiler, of which only trace and kernels remain."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lora_suite.launch.record import RunDir
from lora_suite.launch.traces import Profile
from lora_suite.train.profiling import profile_steps
from lora_suite.train.topology import Axis, Topology
from tests.train.conftest import LORA, Run
from tests.train.fake_backend import FakeBackend


def test_a_profiled_run_trains_as_any_other_and_leaves_a_trace_of_its_phases(
    new_run: Callable[[str], Run],
) -> None:
    plain, profiled = new_run("plain"), new_run("profiled")
    overrides = (LORA, "checkpointing.enabled=true", "checkpointing.metric_name=null")
    plain.train(*overrides)
    profiled.train(*overrides, "logger.profile_steps=2")
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert profiled.metrics[name] == plain.metrics[name]
    assert profiled.record.steps_done == 4
    ours, theirs = ({each.name: each.ok for each in run.record.invariants} for run in (profiled, plain))
    assert ours == theirs
    states = [torch.load(run.folder / "ckpts" / "step_4" / "rank_0.pt") for run in (plain, profiled)]
    factors = [state["backend"]["factors"] for state in states]
    assert factors[0].keys() == factors[1].keys()
    assert all(torch.equal(factors[0][key], factors[1][key]) for key in factors[0])

    files = RunDir(profiled.folder)
    profile = Profile.read(files.kernels)
    assert profile.steps == 2
    assert {row.kind for row in profile.timed} == {"operator"}
    # Of each of two micro batches of two steps: forward the base, its A and the head, and B added in place;
    # backward the head's and B's inputs, and the gradients of A and B added in place.
    products = {
        (row.name, row.phase): row.count
        for row in profile.timed
        if row.name in ("aten::mm", "aten::addmm_", "aten::addmm")
    }
    assert products == {
        ("aten::mm", "forward_backward"): 2 * 2 * (3 + 2),
        ("aten::addmm_", "forward_backward"): 2 * 2 * (1 + 2),
    }
    # The root in the gradient's norm, and AdamW's.
    assert {row.phase for row in profile.timed if row.name == "aten::sqrt"} == {"optimizer"}
    with gzip.open(files.trace, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    ranges = [event["name"] for event in events if str(event.get("name")).startswith("phase/")]
    assert sorted(set(ranges)) == [
        "phase/data",
        "phase/forward_backward",
        "phase/grad_sync",
        "phase/optimizer",
    ]


def test_nothing_is_profiled_unless_asked(run: Run) -> None:
    run.train(LORA)
    assert not RunDir(run.folder).trace.parent.exists()


def test_the_other_ranks_make_the_same_steps_and_write_nothing(tmp_path: Path) -> None:
    made: list[int] = []
    one = Axis(0, 1)
    topology = Topology(1, 2, torch.device("cpu"), Axis(1, 2), one, one)
    profile_steps(lambda: made.append(1), 3, topology, RunDir(tmp_path))
    assert len(made) == 4
    assert list(tmp_path.iterdir()) == []


def test_what_is_profiled_are_whole_steps_that_no_metric_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[float] = []
    original = FakeBackend.optimizer_step

    def noted(backend: FakeBackend, lr: float) -> None:
        steps.append(lr)
        original(backend, lr)

    monkeypatch.setattr(FakeBackend, "optimizer_step", noted)
    run.train("logger.profile_steps=2")
    # Four steps of the training, one to warm the profiler up, two that it records.
    assert len(steps) == 7
    assert len(run.metrics["train/loss"]) == 4
