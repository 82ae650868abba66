# SPDX-License-Identifier: Apache-2.0
"""Planted faults do what they say, so that the verdicts they are to redden can be trusted."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from lora_suite.train import timer
from lora_suite.train.batch import MicroBatch
from lora_suite.train.faults import SlowPhases, _host_wait, drag, kill_if_due
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


class Clock:
    """A clock that goes on only where a test says so; a forward and backward pass takes 0.03 s of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        original = FakeBackend.forward_backward

        def forward_backward(backend: FakeBackend, batches: list[MicroBatch], tokens: int) -> torch.Tensor:
            self.wait(0.03)
            return original(backend, batches, tokens)

        monkeypatch.setattr(FakeBackend, "forward_backward", forward_backward)
        monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def test_a_slow_step_takes_that_many_times_as_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("lora_suite.train.faults.time", SimpleNamespace(sleep=clock.wait))
    run.train("debug.faults.slow_step=3.0")
    for name in ("step_time", "forward_backward"):
        assert list(run.metrics[f"timing/train/{name}"].values()) == pytest.approx([0.09] * 4)


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


PHASES = ("data", "forward_backward", "grad_sync", "optimizer")


@pytest.mark.parametrize("slowed", PHASES)
def test_a_slow_phase_takes_its_share_of_the_step_and_no_other_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, slowed: str
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("lora_suite.train.faults._host_wait", clock.wait)
    run.train(f"debug.faults.slow_phase.{slowed}=2.0", "sft.max_num_steps=8")
    for phase in PHASES:
        own = 0.03 if phase == "forward_backward" else 0.0
        # Two steps are looked at before anything is planted. The delay does not count towards the step that
        # it is a share of: it would double from step to step.
        delay = 0.06 if phase == slowed else 0.0
        expected = [own] * 2 + [own + delay] * 6
        assert list(run.metrics[f"timing/train/{phase}"].values()) == pytest.approx(expected)


def planted(waits: list[float], shares: str, own: list[float]) -> list[float]:
    """What each step waits in all, where step i takes own[i] s by itself."""
    slow = SlowPhases(small_recipe(*shares.split()).debug.faults.slow_phase, one_rank())
    total = []
    for seconds in own:
        waits.clear()
        for phase in PHASES:
            slow.wait(phase, on_device=True)
        total.append(sum(waits))
        slow.after_step(seconds + total[-1])
    return total


def one_rank() -> Topology:
    one = Axis(0, 1)
    return Topology(0, 1, torch.device("cpu"), one, one, one)


def test_a_slow_phase_follows_the_median_of_what_the_steps_take_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("lora_suite.train.faults._host_wait", waits.append)
    monkeypatch.setattr("lora_suite.train.faults.gather", lambda topology, seconds: [seconds])
    own = [60.0, 1.0, 1.0, 9.0, 1.0, 1.0]
    shares = "debug.faults.slow_phase.optimizer=0.03 debug.faults.slow_phase.data=0.5"
    assert planted(waits, shares, own) == pytest.approx([0.0, 0.0, 0.53, 0.53, 0.53, 0.53])


def test_ranks_agree_on_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("lora_suite.train.faults._host_wait", waits.append)
    monkeypatch.setattr("lora_suite.train.faults.gather", lambda topology, seconds: [seconds, 7.0])
    shares = "debug.faults.slow_phase.grad_sync=0.1"
    assert planted(waits, shares, [1.0, 1.0, 1.0]) == pytest.approx([0.0, 0.0, 0.7])


def test_device_and_host_stand_still_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a phase between two events is made longer on the stream; the host must not gain on it."""
    host: list[float] = []
    device: list[int] = []
    monkeypatch.setattr("lora_suite.train.faults._host_wait", host.append)
    monkeypatch.setattr("lora_suite.train.faults._device_wait", device.append)
    monkeypatch.setattr("lora_suite.train.faults._cycles_per_second", lambda: 1e9)
    monkeypatch.setattr("lora_suite.train.faults.gather", lambda topology, seconds: [seconds])
    shares = small_recipe(
        "debug.faults.slow_phase.forward_backward=0.25", "debug.faults.slow_phase.optimizer=0.5"
    ).debug.faults.slow_phase
    slow = SlowPhases(shares, Topology(0, 1, torch.device("cuda"), *[Axis(0, 1)] * 3))
    slow.after_step(2.0)
    slow.after_step(2.0)
    slow.wait("forward_backward", on_device=True)
    slow.wait("optimizer", on_device=False)
    assert host == pytest.approx([0.5, 1.0])
    assert device == [500_000_000]


def test_waiting_is_exact_to_a_millisecond() -> None:
    begin = time.perf_counter()
    _host_wait(0.02)
    assert time.perf_counter() - begin >= 0.02
