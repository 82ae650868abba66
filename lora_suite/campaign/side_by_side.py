# SPDX-License-Identifier: Apache-2.0
"""Runs whose time nobody compares, several at once, each on GPUs of its own.

A run of a pair has the machine to itself, always. A case outside every pair has only limits of its own: where
the person who starts the suite says that these may share the machine, they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from lora_suite.config.naming import counts_cpu_processes
from lora_suite.judge.suite import Execution
from lora_suite.launch.progress import Progress
from lora_suite.plan.model import AnyCase, PlannedRun

Poll = Callable[[Progress | None, str], None]
Devices = tuple[str, ...]
Work = Callable[[PlannedRun, Devices, Poll], Execution]
Done = tuple[PlannedRun, Execution]


def gpus_needed(case: AnyCase) -> int:
    """GPUs that a run of the case takes: none, where its name counts CPU processes."""
    return 0 if counts_cpu_processes(case.stem) else case.gpus


class SideBySide:
    """Runs that are under way at once, at most `slots` of them; used from one thread.

    devices: names of the GPUs that they share, each for one run at a time. A run that needs more than there
    are, or where none are known, has the machine to itself. work: does one run in a thread of its own, on its
    devices (none: those of its environment). It must call the function that it gets now and then, which
    raises KeyboardInterrupt once everything is to stop.
    """

    def __init__(self, slots: int, devices: Sequence[str], work: Work) -> None:
        self._slots = slots
        self._free = list(devices)
        self._devices = len(devices)
        self._work = work
        self._alone = False
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="run")
        self._under_way: dict[Future[Execution], tuple[PlannedRun, Devices]] = {}

    def begin(self, planned: PlannedRun, gpus: int) -> Iterator[Done]:
        """Start a run as soon as there is room for it; yields the runs that ended until then."""
        alone = gpus > self._devices
        while self._under_way and not self._has_room(gpus, alone):
            yield from self._ended()
        taken = () if alone else tuple(self._free[:gpus])
        del self._free[: len(taken)]
        self._alone = alone
        self._under_way[self._threads.submit(self._work, planned, taken, self._poll)] = planned, taken

    def drain(self) -> Iterator[Done]:
        """Yield the runs that are under way, as they end."""
        while self._under_way:
            yield from self._ended()

    def stop(self) -> None:
        """Have every run stop; `drain` then yields how they ended."""
        self._stopping.set()

    def _has_room(self, gpus: int, alone: bool) -> bool:
        return (
            not alone and not self._alone and len(self._under_way) < self._slots and gpus <= len(self._free)
        )

    def _ended(self) -> Iterator[Done]:
        """Wait for a run to end; yield all that have."""
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        for future in done:
            planned, devices = self._under_way.pop(future)
            self._free += devices
            yield planned, future.result()

    def _poll(self, look: Progress | None, last_line: str) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt
