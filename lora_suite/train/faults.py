# SPDX-License-Identifier: Apache-2.0
"""Faults planted on purpose (``debug.faults``), so that a test can see a verdict turn red."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lora_suite.config.schema import Faults, SlowPhase
from lora_suite.train.collect import gather
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.topology import Topology


def kill_if_due(faults: Faults, rank: int, step: int) -> None:
    """Kill this process, as the kernel would, where it is the rank and the step that were named."""
    if faults.kill_rank_at == f"{rank}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory_if_due(faults: Faults, rank: int, step: int) -> None:
    """Raise what torch raises when a GPU's memory runs out, at the rank and the step that were named."""
    if faults.out_of_memory_at == f"{rank}:{step}":
        raise torch.OutOfMemoryError("CUDA out of memory (planted by debug.faults.out_of_memory_at)")


def drag(faults: Faults, seconds: float, topology: Topology) -> None:
    """Wait so long that a step whose work took `seconds` takes `slow_step` times as long.

    All ranks wait equally long, for the longest of their times. If each waited for its own, those that woke
    first would wait for the others in their next step, multiply that wait as well, and every step would be
    slower than the one before.
    """
    if faults.slow_step > 1.0:
        time.sleep((faults.slow_step - 1.0) * max(gather(topology, seconds)))


# Steps whose median is the step's own time, and those that must have been seen before it is known: the very
# first ones compile and allocate.
_REMEMBERED, _NEEDED = 9, 2
# Cycles of the trial that finds out how many of them a second has: some milliseconds.
_TRIAL_CYCLES = 10_000_000
# A sleep may end this many seconds late; the rest is waited for awake.
_SLEEP_ERROR = 5e-4


class SlowPhases:
    """Makes phases of a step longer by a share of the whole step (`debug.faults.slow_phase`).

    The share is of what the step takes by itself: the median of the last steps less what was planted in them,
    so that the delay does not grow by itself. All ranks wait equally long (see `drag`). The first steps are
    left alone.
    """

    def __init__(self, shares: SlowPhase, topology: Topology) -> None:
        self._shares = {phase: share for phase, share in shares.model_dump().items() if share > 0.0}
        self._topology = topology
        self._own: deque[float] = deque(maxlen=_REMEMBERED)
        self._step = 0.0
        self._planted = 0.0
        self._cycles_per_second = 0.0

    def wait(self, phase: str, on_device: bool) -> None:
        """Wait at the end of a phase, before its end is marked.

        on_device: the phase is timed on the device. There device and host both stand still for as long: so
        whichever is behind the other stays as far behind, and the step becomes longer by just this.
        """
        seconds = self._shares.get(phase, 0.0) * self._step
        if seconds == 0.0:
            return
        self._planted += seconds
        if on_device and self._topology.device.type == "cuda":
            _device_wait(round(seconds * self._cycles_per_second))
        _host_wait(seconds)

    def after_step(self, seconds: float) -> None:
        """Learn from a step that took `seconds` in all; between steps, because the ranks agree on a time."""
        if not self._shares:
            return
        self._own.append(seconds - self._planted)
        self._planted = 0.0
        if len(self._own) < _NEEDED:
            return
        if self._topology.device.type == "cuda" and self._cycles_per_second == 0.0:
            self._cycles_per_second = _cycles_per_second()
        self._step = max(gather(self._topology, statistics.median_low(self._own)))


def _host_wait(seconds: float) -> None:
    """Wait on the host, to some microseconds."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - _SLEEP_ERROR, 0.0))
    while time.perf_counter() < end:
        pass


def _device_wait(cycles: int) -> None:
    """Let the device's stream stand still for some of its clock's cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _cycles_per_second() -> float:
    """How fast the device's clock counts, now that the steps have woken it up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    _device_wait(_TRIAL_CYCLES)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return _TRIAL_CYCLES / (milliseconds / 1000.0)


@contextmanager
def freezing(faults: Faults, bank: AdapterBank | None) -> Iterator[None]:
    """Around the optimizer's step: with `freeze_b` no B moves, although each has received its gradient."""
    if not faults.freeze_b or bank is None:
        yield
        return
    before = bank.master.clone()
    yield
    for slot in bank.slots:
        if slot.factor == "b":
            bank.master[slot.start : slot.stop] = before[slot.start : slot.stop]
    bank.publish()
