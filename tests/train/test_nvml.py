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
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, NVML_SUCCESS = 139, 0

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

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:
        # A field without a link's number is that of link 0 alone.
        assert fields == [(139, 2**32 - 1)]
        return [SimpleNamespace(nvmlReturn=self.NVML_SUCCESS, value=SimpleNamespace(ullVal=3 * 2**19))]


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


def test_what_a_gpu_received_is_counted_in_kib_over_all_links(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert Gpus().received_gib(0) == 1.5
    assert Gpus().received_gib(1) is None


class WithoutLinks(FakeNvml):
    """A GPU of whose links the driver tells nothing."""

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(ullVal=0))]


class Refusing(FakeNvml):
    """A driver that does not know the question."""

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:
        raise self.NVMLError


class Old(FakeNvml):
    """A library from before this counter."""

    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = None  # type: ignore[assignment]


@pytest.mark.parametrize("driver", [WithoutLinks, Refusing, Old])
def test_what_is_not_counted_is_not_zero(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, driver: type[FakeNvml]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    assert Gpus().received_gib(0) is None


def test_without_gpu_or_nvml_there_is_nothing(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (len(Gpus()), Gpus().driver(), Gpus().health()) == (0, None, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert len(Gpus()) == 0
    assert Gpus().received_gib(0) is None
