# SPDX-License-Identifier: Apache-2.0
"""Phases of a step on the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from lora_suite.train.timer import StepTimer


def test_each_phase_has_its_own_time_and_a_repeated_one_adds_up() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    time.sleep(0.02)
    timer.host("data")
    timer.begin_device()
    time.sleep(0.04)
    timer.device("forward_backward")
    timer.host("optimizer")
    time.sleep(0.03)
    timer.host("forward_backward")
    phases = timer.phases
    assert phases["data"] == pytest.approx(0.02, abs=0.015)
    assert phases["forward_backward"] == pytest.approx(0.07, abs=0.03)
    assert phases["optimizer"] < 0.01
    assert sum(phases.values()) == pytest.approx(timer.seconds, rel=1e-6)


def test_a_new_step_starts_at_zero() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    time.sleep(0.05)
    timer.host("data")
    timer.start()
    timer.host("data")
    assert timer.seconds < 0.05
    assert list(timer.phases) == ["data"]
