# SPDX-License-Identifier: Apache-2.0
"""Planted faults do what they say, so that the verdicts they are to redden can be trusted."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from lora_suite.train.batch import MicroBatch
from lora_suite.train.faults import drag, kill_if_due
from lora_suite.train.topology import Axis, Topology
from tests.train.conftest import LORA, Run, small_recipe
from tests.train.fake_backend import FakeBackend


def test_a_frozen_b_has_gradients_but_never_moves(run: Run) -> None:
    run.train(LORA, "debug.faults.freeze_b=true")
    verdicts = {each.name: each.ok for each in run.record.invariants}
    assert verdicts["b_gradients_step1"] is True
    assert verdicts["adapters_moved"] is False
    messages = {each.name: each.message for each in run.record.invariants}
    assert "linear.b" in messages["adapters_moved"]


def test_a_slow_step_takes_that_many_times_as_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FakeBackend.forward_backward

    def slower(backend: FakeBackend, batches: list[MicroBatch], tokens: int) -> torch.Tensor:
        time.sleep(0.03)
        return original(backend, batches, tokens)

    waited: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        waited.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(FakeBackend, "forward_backward", slower)
    monkeypatch.setattr("lora_suite.train.faults.time.sleep", noted)
    run.train("debug.faults.slow_step=3.0")
    metrics = run.metrics
    # Of each pair of waits the first is the work's own.
    for step, extra in zip(metrics["train/loss"], waited[1::2], strict=True):
        work = metrics["timing/train/step_time"][step] - metrics["timing/train/data"][step]
        own = extra / 2.0
        assert own >= 0.03
        assert work >= 3.0 * own
        forward = metrics["timing/train/forward_backward"][step]
        assert forward >= work - own


def test_all_ranks_wait_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that woke early waits for the others in its step, and must not wait more than they do for it."""
    waited: list[float] = []
    monkeypatch.setattr("lora_suite.train.faults.time.sleep", waited.append)
    monkeypatch.setattr("lora_suite.train.faults.gather", lambda topology, seconds: [0.1, 0.7])
    one = Axis(0, 1)
    faults = small_recipe("debug.faults.slow_step=3.0").debug.faults
    for rank, seconds in enumerate([0.1, 0.7]):
        drag(faults, seconds, Topology(rank, 2, torch.device("cpu"), Axis(rank, 2), one, one))
    assert waited == pytest.approx([1.4, 1.4])


def test_the_named_rank_kills_itself_at_the_named_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    run.train('debug.faults.kill_rank_at="0:2"')
    assert killed == [(os.getpid(), signal.SIGKILL)]
    faults = small_recipe('debug.faults.kill_rank_at="0:2"').debug.faults
    kill_if_due(faults, rank=1, step=2)
    kill_if_due(faults, rank=0, step=3)
    assert len(killed) == 1


def test_stopping_early_looks_like_being_done(run: Run) -> None:
    assert run.train("debug.faults.stop_at=3") == 0
    assert list(run.metrics["train/loss"]) == ["1", "2", "3"]
    assert run.record.steps_done == 3
