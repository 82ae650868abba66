# SPDX-License-Identifier: Apache-2.0
"""How long each phase of a step took, without waiting for the device between phases."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Times the consecutive phases of one step.

    A phase ends with `host(name)` or with `device(name)`. On CUDA the host runs ahead of the device, so a
    `device` phase is measured by events on the stream. The next `host` call must come after the host has
    waited for the device: the phase it ends also takes what lies between the last event and that wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._phases: dict[str, float] = {}
        self._pending: list[tuple[str, torch.cuda.Event]] = []
        self._start = self._mark = 0.0

    def start(self) -> None:
        """Begin a step; the device must be idle."""
        self._phases = {}
        self._pending = []
        self._start = self._mark = time.perf_counter()

    def host(self, phase: str) -> None:
        """End a phase whose end the host has seen."""
        now = time.perf_counter()
        elapsed = now - self._mark
        for (name, end), (_, begin) in zip(self._pending[1:], self._pending, strict=False):
            seconds = begin.elapsed_time(end) / 1000.0
            self._phases[name] = self._phases.get(name, 0.0) + seconds
            elapsed -= seconds
        self._pending = []
        self._phases[phase] = self._phases.get(phase, 0.0) + max(elapsed, 0.0)
        self._mark = now

    def device(self, phase: str) -> None:
        """End a phase whose work the device may still be doing."""
        if not self._cuda:
            self.host(phase)
            return
        self._pending.append((phase, self._event()))

    def begin_device(self) -> None:
        """Say that the next phases are the device's; it must be idle."""
        if self._cuda:
            self._pending.append(("", self._event()))

    @property
    def seconds(self) -> float:
        """The step by the wall clock, up to the end of its last `host` phase."""
        return self._mark - self._start

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, so far."""
        return dict(self._phases)

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
