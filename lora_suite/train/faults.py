# SPDX-License-Identifier: Apache-2.0
"""Faults planted on purpose (``debug.faults``), so that a test can see a verdict turn red."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lora_suite.config.schema import Faults
from lora_suite.train.collect import gather
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.topology import Topology


def kill_if_due(faults: Faults, rank: int, step: int) -> None:
    """Kill this process, as the kernel would, where it is the rank and the step that were named."""
    if faults.kill_rank_at == f"{rank}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def drag(faults: Faults, seconds: float, topology: Topology) -> None:
    """Wait so long that a step whose work took `seconds` takes `slow_step` times as long.

    All ranks wait equally long, for the longest of their times. If each waited for its own, those that woke
    first would wait for the others in their next step, multiply that wait as well, and every step would be
    slower than the one before.
    """
    if faults.slow_step > 1.0:
        time.sleep((faults.slow_step - 1.0) * max(gather(topology, seconds)))


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
