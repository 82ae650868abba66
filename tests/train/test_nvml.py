# SPDX-License-Identifier: Apache-2.0
"""What is asked of the driver, with a stand-in for NVML: no test machine needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_suite.train.nvml import Gpus


class FakeNvml:
    """Two GPUs on the node; CUDA sees the second alone."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-second"
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=3 * 2**30)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 4


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="second"))


def test_figures_of_the_gpu_that_cuda_sees(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    gpus = Gpus()
    assert len(gpus) == 1
    assert gpus.memory_gib() == [3.0]
    assert gpus.driver() == "580.1"
    assert gpus.health() == [
        {
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 3201,
            "temperature_c": 41,
            "power_w": None,
            "throttle_reasons": 4,
        }
    ]


def test_without_gpu_or_nvml_there_is_nothing(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (len(Gpus()), Gpus().driver(), Gpus().health()) == (0, None, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert len(Gpus()) == 0
