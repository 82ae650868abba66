# SPDX-License-Identifier: Apache-2.0
"""What the driver says of this node's GPUs: memory in use, clocks, temperature, reasons to throttle."""

from __future__ import annotations

from typing import Any

import torch

GIB = 2**30
_KIB = 2**10
_ALL_LINKS = 0xFFFFFFFF
"""In place of a link's number: their sum (nvml.h, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)."""


class Gpus:
    """The GPUs this process can see, in CUDA's order, through NVML; none without NVML or GPU."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        if not torch.cuda.is_available():
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handles = [_handle(pynvml, index) for index in range(torch.cuda.device_count())]
            self._nvml = pynvml
        except pynvml.NVMLError:
            self._handles = []

    def __len__(self) -> int:
        return len(self._handles)

    def memory_gib(self) -> list[float]:
        """Memory in use on each GPU in GiB, by whomever."""
        return [self._nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB for handle in self._handles]

    def driver(self) -> str | None:
        """Version of the driver, or None without GPUs."""
        return str(self._nvml.nvmlSystemGetDriverVersion()) if self._handles else None

    def health(self) -> list[dict[str, Any]]:
        """Clocks (MHz), temperature (°C), power (W) and reasons to throttle (bit mask) of each GPU.

        A figure that the GPU does not offer is None.
        """
        nvml = self._nvml
        return [
            {
                "sm_clock_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
                "temperature_c": self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                "power_w": _watts(self._ask(nvml.nvmlDeviceGetPowerUsage, handle)),
                "throttle_reasons": self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            }
            for handle in self._handles
        ]

    def received_gib(self, index: int) -> float | None:
        """What a GPU has received over NVLink since the driver counts, in GiB without protocol.

        None where it has no links, or the driver does not tell.
        """
        if index >= len(self._handles):
            return None
        field = getattr(self._nvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", None)
        if field is None:
            return None
        found = self._ask(self._nvml.nvmlDeviceGetFieldValues, self._handles[index], [(field, _ALL_LINKS)])
        if found is None or found[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(found[0].value.ullVal) * _KIB / GIB

    def processes(self) -> list[list[int]]:
        """Ids of the processes that compute on each GPU, as the driver knows them; none where it won't tell.

        In a container they may be the ids that processes have on the host.
        """
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses if self._handles else None
        return [[each.pid for each in self._ask(running, handle) or []] for handle in self._handles]

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def _handle(nvml: Any, index: int) -> Any:
    """NVML counts all GPUs of the node; CUDA those it may see. The UUID names the same one in both."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000.0
