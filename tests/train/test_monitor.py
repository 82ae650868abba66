# SPDX-License-Identifier: Apache-2.0
"""The memory monitor: names, seconds, maxima, and an end in time."""

from __future__ import annotations

import threading
import time

from lora_suite.train.monitor import MemoryMonitor


def test_the_largest_sample_of_a_second_is_kept() -> None:
    values = iter([1.0, 5.0, 2.0])
    last = 3.0
    monitor = MemoryMonitor(2, 0.02, lambda: [10.0, next(values, last)])
    monitor.start()
    time.sleep(0.3)
    samples = monitor.stop()
    assert list(samples) == [0]
    assert samples[0] == {"ray/node.2.gpu.0.mem_gb": 10.0, "ray/node.2.gpu.1.mem_gb": 5.0}


def test_a_running_second_is_not_taken_yet() -> None:
    monitor = MemoryMonitor(0, 0.1, lambda: [1.0])
    monitor.start()
    assert monitor.take() == {}
    time.sleep(1.1)
    assert list(monitor.take()) == [0]
    assert monitor.take() == {}
    assert 1 in monitor.stop()


def test_it_stops_at_once_however_long_the_interval() -> None:
    monitor = MemoryMonitor(0, 600.0, lambda: [1.0])
    monitor.start()
    began = time.monotonic()
    monitor.stop()
    assert time.monotonic() - began < 1.0
    assert not [thread for thread in threading.enumerate() if thread.name == "memory-monitor"]
