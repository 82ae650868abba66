# SPDX-License-Identifier: Apache-2.0
"""Looks at GPUs while a training goes on: are they throttled, and does anybody else use them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_suite.train.monitor import Repeating
from lora_suite.train.nvml import Gpus


class GpuWatch:
    """Looks every second at the GPUs that this node's ranks use, in a thread.

    gpus: in the order of local ranks. used: how many of them have a rank. node: this node's number.
    """

    def __init__(self, gpus: Gpus, used: int, node: int, interval: float = 1.0) -> None:
        self._gpus = gpus
        self._seen = [_Seen() for _ in range(min(used, len(gpus)))]
        self._node = node
        self._repeating = Repeating("gpu-watch", interval, self._look)

    def start(self) -> None:
        """Take the first look and start the thread."""
        self._repeating.start()

    def stop(self) -> list[dict[str, Any]]:
        """Take a last look; return what was seen of each GPU, as run.json keeps it under `health.during`.

        node, gpu: which. samples: looks. throttled: how many of them had a bit of NVML's mask set, by bit.
        min_sm_clock_mhz, max_temperature_c: None where the GPU does not offer them. others: most processes
        besides the rank's at once. other_pids: their ids, where they can be told from the rank's own.
        """
        self._repeating.stop()
        return [
            {"node": self._node, "gpu": number, **seen.as_dict()} for number, seen in enumerate(self._seen)
        ]

    def _look(self) -> None:
        for seen, look, pids in zip(self._seen, self._gpus.health(), self._gpus.processes(), strict=False):
            seen.take(look, pids)


@dataclass
class _Seen:
    """What was seen of one GPU so far."""

    samples: int = 0
    throttled: Counter[int] = field(default_factory=Counter)
    min_clock: int | None = None
    max_temperature: int | None = None
    others: int = 0
    other_pids: set[int] = field(default_factory=set)

    def take(self, look: Mapping[str, Any], pids: Sequence[int]) -> None:
        """Add one look at the GPU and at the processes on it."""
        self.samples += 1
        mask = look["throttle_reasons"] or 0
        self.throttled.update(1 << bit for bit in range(mask.bit_length()) if mask >> bit & 1)
        self.min_clock = _chosen(min, self.min_clock, look["sm_clock_mhz"])
        self.max_temperature = _chosen(max, self.max_temperature, look["temperature_c"])
        ours = [pid for pid in pids if _is_of_this_training(pid)]
        # In a container the driver may tell the host's ids, of which none is known here; one is the rank's.
        self.others = max(self.others, len(pids) - max(len(ours), 1))
        if ours:
            self.other_pids |= set(pids) - set(ours)

    def as_dict(self) -> dict[str, Any]:
        """What was seen, as plain data."""
        return {
            "samples": self.samples,
            "throttled": {str(bit): count for bit, count in sorted(self.throttled.items())},
            "min_sm_clock_mhz": self.min_clock,
            "max_temperature_c": self.max_temperature,
            "others": self.others,
            "other_pids": sorted(self.other_pids),
        }


def _chosen(choose: Any, known: int | None, value: int | None) -> int | None:
    values = [each for each in (known, value) if each is not None]
    return choose(values) if values else None


def _is_of_this_training(pid: int) -> bool:
    """Whether a process is this one or another rank: torchrun is the parent of all ranks of a node."""
    return pid == os.getpid() or _parent(pid) == os.getppid()


def _parent(pid: int) -> int | None:
    """The parent of a process, None where it cannot be told."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name before, in parentheses, may hold anything; the state and the parent stand behind it.
    return int(status.rpartition(")")[2].split()[1])
