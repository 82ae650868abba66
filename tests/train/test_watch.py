# SPDX-License-Identifier: Apache-2.0
"""What is seen of a GPU while a training goes on, with a stand-in for the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from lora_suite.train.watch import GpuWatch

OURS = os.getpid()


class FakeGpus:
    """Answers each look with the next of `looks`, then with the last again."""

    def __init__(self, *looks: list[tuple[int | None, int | None, int | None, list[int]]]) -> None:
        self._looks = list(looks)
        self._now = looks[0]

    def __len__(self) -> int:
        return len(self._now)

    def health(self) -> list[dict[str, Any]]:
        self._now = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return [
            {"throttle_reasons": mask, "sm_clock_mhz": clock, "temperature_c": heat}
            for mask, clock, heat, _ in self._now
        ]

    def processes(self) -> list[list[int]]:
        return [pids for *_, pids in self._now]


def seen(*looks: Any, used: int = 1) -> list[dict[str, Any]]:
    """A first and a last look; the interval is too long for one between."""
    watch = GpuWatch(FakeGpus(*looks), used, 0, interval=600.0)  # type: ignore[arg-type]
    watch.start()
    return watch.stop()


def test_bits_are_counted_each_and_extremes_kept() -> None:
    (gpu,) = seen([(0x04 | 0x20, 1980, 60, [OURS])], [(0x04, 1410, 85, [OURS])])
    assert gpu["samples"] == 2
    assert gpu["throttled"] == {"4": 2, "32": 1}
    assert (gpu["min_sm_clock_mhz"], gpu["max_temperature_c"]) == (1410, 85)
    assert (gpu["others"], gpu["other_pids"]) == (0, [])


def test_what_the_gpu_does_not_tell_is_none() -> None:
    (gpu,) = seen([(None, None, None, [])])
    assert gpu["throttled"] == {}
    assert (gpu["min_sm_clock_mhz"], gpu["max_temperature_c"]) == (None, None)
    assert gpu["others"] == 0


def test_another_process_is_named() -> None:
    (gpu,) = seen([(0, 1, 1, [OURS, 1])], [(0, 1, 1, [OURS])])
    assert (gpu["others"], gpu["other_pids"]) == (1, [1])


def test_other_ranks_of_the_node_are_ours() -> None:
    """A rank is a process that has our parent."""
    script = (
        "import os, sys\n"
        "from lora_suite.train.watch import _is_of_this_training as ours\n"
        "print(ours(os.getpid()), ours(int(sys.argv[1])), ours(1))\n"
    )
    sibling = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        said = subprocess.run(
            [sys.executable, "-c", script, str(sibling.pid)], capture_output=True, text=True, check=True
        )
    finally:
        sibling.communicate(b"\n")
    assert said.stdout.split() == ["True", "True", "False"]


def test_ids_of_another_name_space_count_but_are_not_named() -> None:
    """Two processes of which neither is known here: one must be the rank."""
    gone = 2**22 + 1
    (gpu,) = seen([(0, 1, 1, [gone, gone + 1])])
    assert (gpu["others"], gpu["other_pids"]) == (1, [])
    assert seen([(0, 1, 1, [gone])])[0]["others"] == 0


def test_gpus_without_a_rank_are_not_looked_at() -> None:
    gpus = seen([(0, 1, 1, [OURS]), (4, 1, 1, [1])], used=1)
    assert [gpu["gpu"] for gpu in gpus] == [0]


@pytest.mark.parametrize("used", [0, 1])
def test_its_thread_ends(used: int) -> None:
    seen([(0, 1, 1, [])], used=used)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpu-watch"]
