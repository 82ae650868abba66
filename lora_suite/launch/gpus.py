# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine that a run may use, and who is on them already.

Asked through NVML (nvidia-ml-py), without torch. Without NVML nothing is known, and nothing is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GIB = 2**30
# A process that was just ended is on the driver's list a little longer.
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.25
# Where several processes share a GPU through NVIDIA's service, its server is on it all the time.
_SHARING_SERVICE = "nvidia-cuda-mps-server"


@dataclass(frozen=True)
class Gpu:
    """One GPU: its number by NVML, and its UUID, by which CUDA knows it too."""

    index: int
    uuid: str


class Driver:
    """NVML as far as it is needed here; `open` starts it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls) -> Driver | None:
        """Start NVML; None without nvidia-ml-py, without a driver or without a GPU."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            found = cls(pynvml)
            return found if found.gpus() else None
        except pynvml.NVMLError:
            return None

    def gpus(self) -> list[Gpu]:
        """All GPUs of the machine, in NVML's order, which is that of the PCI bus."""
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [Gpu(index, _text(nvml.nvmlDeviceGetUUID(handle))) for index, handle in enumerate(handles)]

    def processes(self, gpu: Gpu) -> list[str]:
        """The processes that compute on a GPU, named: `pid 71 python train.py (1.5 GiB)`."""
        nvml = self._nvml
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(gpu.index))
        except nvml.NVMLError:
            return []
        told = ((process, self._command(process.pid)) for process in running)
        return [
            f"pid {process.pid} {command}{_memory(process.usedGpuMemory)}"
            for process, command in told
            if _SHARING_SERVICE not in command
        ]

    def _command(self, pid: int) -> str:
        """A process' command line; where it is hidden, its name, if the driver tells it."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        line = " ".join(word.decode(errors="replace") for word in words).strip()
        if line:
            return line[:100]
        try:
            return _text(self._nvml.nvmlSystemGetProcessName(pid))
        except self._nvml.NVMLError:
            return "(a process that cannot be seen from here)"


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu] | None:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order; None where it names parts of GPUs (MIG).

    It is read as CUDA reads it: numbers, or beginnings of UUIDs; what follows an entry that is no GPU is
    ignored (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables). Numbers are
    taken as NVML counts, which CUDA shares where all GPUs are of one model, or with
    `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    """
    asked = environment.get(VISIBLE)
    if asked is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in (word.strip() for word in asked.split(",")):
        if entry.startswith("MIG-"):
            return None
        fits = [
            gpu
            for gpu in gpus
            if entry == str(gpu.index) or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))
        ]
        if len(fits) != 1 or fits[0] in found:
            break
        found += fits
    return found


def busy(driver: Driver, gpus: Sequence[Gpu], patience: float | None = None) -> str:
    """Who is on the GPUs, in words; empty once none of them has a process, which is waited for.

    patience: seconds to wait; None: as long as the driver may take to forget a process.
    """
    deadline = time.monotonic() + (_PATIENCE_SECONDS if patience is None else patience)
    while True:
        told = "; ".join(_told(driver, gpus))
        if not told or time.monotonic() >= deadline:
            return told
        time.sleep(_POLL_SECONDS)


def _told(driver: Driver, gpus: Sequence[Gpu]) -> Iterator[str]:
    for gpu in gpus:
        processes = driver.processes(gpu)
        if processes:
            yield f"GPU {gpu.index} is in use by {', '.join(processes)}"


def _memory(used: int | None) -> str:
    return f" ({used / _GIB:.1f} GiB)" if used else ""


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
