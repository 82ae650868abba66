# SPDX-License-Identifier: Apache-2.0
"""Samples device memory beside the training, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Samples = dict[int, dict[str, float]]
"""Values by metric, by whole seconds since the start."""


class Repeating:
    """Calls a function at an interval of seconds, in a daemon thread of the given name."""

    def __init__(self, name: str, interval: float, call: Callable[[], None]) -> None:
        self._interval = interval
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Call it a first time and start the thread."""
        self._call()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and call it a last time."""
        self._stop.set()
        self._thread.join()
        self._call()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._call()


class MemoryMonitor:
    """Samples the memory of every GPU of one node at an interval.

    read: memory in use of each GPU in GiB. Metrics are called ``ray/node.N.gpu.M.mem_gb``, the name that
    public expressions use; the unit behind "gb" is GiB there as here. Of several samples in one second the
    largest is kept, since what is asked of the series is its maximum.
    """

    def __init__(self, node: int, interval: float, read: Callable[[], list[float]]) -> None:
        self._node = node
        self._read = read
        self._samples: Samples = {}
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._repeating = Repeating("memory-monitor", interval, self._sample)

    def start(self) -> None:
        """Take the first sample and start the thread."""
        self._start = time.monotonic()
        self._repeating.start()

    def take(self) -> Samples:
        """Return the samples since the last call, less the running second's (it may still grow)."""
        now = self._second()
        with self._lock:
            return {second: self._samples.pop(second) for second in sorted(self._samples) if second < now}

    def stop(self) -> Samples:
        """Take a last sample, end the thread, return what `take` has not returned."""
        self._repeating.stop()
        with self._lock:
            rest, self._samples = self._samples, {}
        return rest

    def _sample(self) -> None:
        values = self._read()
        second = self._second()
        with self._lock:
            sample = self._samples.setdefault(second, {})
            for gpu, value in enumerate(values):
                name = f"ray/node.{self._node}.gpu.{gpu}.mem_gb"
                sample[name] = max(value, sample.get(name, 0.0))

    def _second(self) -> int:
        return int(time.monotonic() - self._start)
