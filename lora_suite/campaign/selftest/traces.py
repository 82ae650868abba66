# SPDX-License-Identifier: Apache-2.0
"""Seeded step times of a pair of arms: what a real machine does to them, and what is planted in them.

On the log scale, step i of arm a in block r at place t of the order ABBA BAAB:

    y = batch_i + block_r + host_t + run_{a,r} + drift · t + AR(1)_i + spike_i + warm-up_i + planted_{a,i}

batch_i is common to both arms, because they see the same batches; block_r is, because the runs of a block
follow each other. host_t has two levels, and changes before one run in five. The default figures are those of
727 golden traces of Megatron-LM and of twelve systems of MLPerf Training 5.1 (LoRA): step scatter 1.5 % with
lag-1 correlation 0.4, spikes in 3 % of the steps, run-to-run 0.4 %, warm-up of one to four steps at four to a
hundred times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from check_metrics import Series
from lora_suite.judge.block import Block
from lora_suite.judge.evidence import Evidence
from lora_suite.launch.record import RunRecord
from lora_suite.plan.metric_names import LOSS, STEP_TIME
from lora_suite.plan.order import interleave

FULL, LORA = "full", "lora"
_HOST_CHANGES = 0.2
_RECORD = RunRecord(run_id="", case="", started="", recipe={}, recipe_hash="")

Values = NDArray[np.float64]
Planted = Callable[[int], Values]
"""What is added to the logarithm of each step time, by the number of steps."""


@dataclass(frozen=True)
class Machine:
    """How a machine scatters step times; all spreads are standard deviations of logarithms.

    host: by how much the slower of two levels of the host is slower. drift: of each run after the one before.
    warmup: the most steps that are slow at first.
    """

    steps: int = 40
    noise: float = 0.015
    correlation: float = 0.4
    spikes: float = 0.03
    spike_size: float = 0.3
    run: float = 0.004
    block: float = 0.01
    host: float = 0.0
    drift: float = 0.0
    batch: float = 0.2
    warmup: int = 4


# Nothing but scatter: figures whose log ratio of two runs has a spread of 0.5 %.
QUIET = Machine(noise=0.005, run=0.00315, spikes=0.0, block=0.002)


def slower(share: float) -> Planted:
    """Every step slower by a share."""
    return lambda steps: np.full(steps, math.log1p(share))


def every_tenth(factor: float) -> Planted:
    """Every tenth step longer by a factor."""
    return lambda steps: np.where(np.arange(1, steps + 1) % 10 == 0, math.log(factor), 0.0)


def slow_start(share: float, factor: float) -> Planted:
    """The first share of the steps longer by a factor."""
    return lambda steps: np.where(np.arange(steps) < share * steps, math.log(factor), 0.0)


def nothing(steps: int) -> Values:
    """Nothing planted."""
    return np.zeros(steps)


def blocks(
    seed: int, repeats: int, machine: Machine, lora: Planted = nothing, full: Planted = nothing
) -> list[Block]:
    """Blocks of both arms, run in the order that a campaign uses."""
    generator = np.random.default_rng(seed)
    batch = generator.normal(0.0, machine.batch, machine.steps)
    planted = {LORA: lora(machine.steps), FULL: full(machine.steps)}
    shared = generator.normal(0.0, machine.block, repeats)
    host = machine.host * (np.cumsum(generator.random(2 * repeats) < _HOST_CHANGES) % 2)
    arms: list[dict[str, Evidence]] = [{} for _ in range(repeats)]
    for place, (repeat, arm) in enumerate(interleave((FULL, LORA), repeats)):
        level = shared[repeat - 1] + host[place] + machine.drift * place
        logs = batch + level + planted[arm] + _run(generator, machine)
        arms[repeat - 1][arm] = evidence(np.exp(logs))
    return [Block(number, runs) for number, runs in enumerate(arms, 1)]


def evidence(step_times: Values) -> Evidence:
    """A run of which only its step times are known, and how far it came."""
    steps = tuple(range(1, len(step_times) + 1))
    metrics = {
        name: Series(name, steps, tuple(values))
        for name, values in ((STEP_TIME, step_times.tolist()), (LOSS, [1.0] * len(steps)))
    }
    return Evidence(metrics, _RECORD)


def _run(generator: np.random.Generator, machine: Machine) -> Values:
    """What one run adds: its own level, correlated scatter, spikes, warm-up."""
    steps = machine.steps
    scatter = generator.normal(0.0, machine.noise, steps)
    scatter[1:] *= math.sqrt(1.0 - machine.correlation**2)
    for step in range(1, steps):
        scatter[step] += machine.correlation * scatter[step - 1]
    spikes = np.where(
        generator.random(steps) < machine.spikes, generator.exponential(machine.spike_size, steps), 0.0
    )
    warm = int(generator.integers(1, machine.warmup + 1))
    scatter[:warm] += np.sort(generator.uniform(math.log(4.0), math.log(100.0), warm))[::-1]
    level: float = generator.normal(0.0, machine.run)
    return scatter + spikes + level
