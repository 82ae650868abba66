# SPDX-License-Identifier: Apache-2.0
"""Seeded traces: that they scatter as they say, and that what is planted is there."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from lora_suite.campaign.selftest.traces import (
    FULL,
    LORA,
    QUIET,
    Machine,
    blocks,
    every_tenth,
    nothing,
    slow_start,
    slower,
)
from lora_suite.judge.block import Block
from lora_suite.plan.metric_names import STEP_TIME

STILL = Machine(noise=0.0, spikes=0.0, run=0.0, block=0.0, batch=0.0, warmup=1)


def logs(block: Block, arm: str) -> np.ndarray:
    """Logs of an arm's step times, less the first four, which may be warm-up."""
    return np.log(block.arms[arm].metrics[STEP_TIME].values)[4:]


def test_a_seed_is_a_trace():
    one, same, other = (blocks(seed, 2, Machine())[1].arms[LORA].metrics for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_arms_share_batches_and_blocks_and_have_runs_of_their_own():
    given = blocks(3, 400, Machine(spikes=0.0))
    levels = {arm: np.array([np.median(logs(block, arm)) for block in given]) for arm in (FULL, LORA)}
    # Block 1 % and run 0.4 % in either arm; between the arms the run's, and the steps' scatter.
    assert np.corrcoef(levels[FULL], levels[LORA])[0, 1] > 0.6
    steps = [logs(block, LORA) - logs(block, FULL) for block in given]
    assert float(np.std(np.concatenate(steps))) == pytest.approx(
        math.sqrt(2 * (0.015**2 + 0.004**2)), rel=0.05
    )
    within = [step - step.mean() for step in steps]
    lag = np.mean([np.dot(each[1:], each[:-1]) / np.dot(each, each) for each in within])
    # 0.4, less what taking out a mean of 36 steps costs.
    assert lag == pytest.approx(0.4, abs=0.08)


def test_the_quiet_machine_has_a_pair_noise_of_half_a_percent():
    ratios = [float(np.median(logs(block, LORA) - logs(block, FULL))) for block in blocks(4, 2000, QUIET)]
    assert statistics.stdev(ratios) == pytest.approx(0.005, rel=0.05)


def test_what_is_planted_is_there_and_nowhere_else():
    for planted, expected in (
        (slower(0.02), np.full(36, math.log(1.02))),
        (every_tenth(3.0), np.array([math.log(3.0) if step % 10 == 0 else 0.0 for step in range(5, 41)])),
        (slow_start(0.5, 2.0), np.array([math.log(2.0)] * 16 + [0.0] * 20)),
        (nothing, np.zeros(36)),
    ):
        (block,) = blocks(5, 1, STILL, planted)
        assert logs(block, LORA) == pytest.approx(expected)
        assert logs(block, FULL) == pytest.approx(np.zeros(36))


def test_drift_follows_the_order_of_the_runs():
    given = blocks(6, 2, replace(STILL, drift=0.01))
    # ABBA: full, lora, lora, full.
    levels = [float(np.median(logs(block, arm))) for block in given for arm in (FULL, LORA)]
    assert levels == pytest.approx([0.0, 0.01, 0.03, 0.02])


def test_warm_up_and_host_levels():
    (block,) = blocks(7, 1, STILL)
    first = block.arms[FULL].metrics[STEP_TIME].values
    assert 4.0 <= first[0] <= 100.0
    assert first[1] == pytest.approx(1.0)
    two = {
        round(float(np.median(logs(block, arm))), 6)
        for block in blocks(8, 30, replace(STILL, host=0.03))
        for arm in (FULL, LORA)
    }
    assert two == {0.0, 0.03}
