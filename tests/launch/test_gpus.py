# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a run may use and who is on them, on a made-up NVML."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_suite.launch.gpus import Driver, Gpu, busy, visible
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.record import RunDir, RunRecord
from lora_suite.plan.model import PlannedRun
from tests.launch.test_local import make_case

GIB = 2**30
GPUS = [Gpu(0, "GPU-aaaa-0"), Gpu(1, "GPU-bbbb-1"), Gpu(2, "GPU-bbcc-2")]


class NVMLError(Exception):
    """As NVML's own."""


@dataclass
class FakeNvml:
    """As much of NVML as is asked. running: (process, bytes) by GPU. leaves: looks until they are gone."""

    running: dict[int, list[tuple[int, int | None]]]
    leaves: int = 10**6
    NVMLError = NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return len(GPUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return GPUS[handle].uuid.encode()

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self.leaves -= 1
        if self.leaves < 0:
            return []
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.running.get(handle, [])]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid == 2**22 + 1:
            return b"theirs"
        raise NVMLError


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("GPU-aaaa", [0]),
        ("GPU-bb", []),
        ("GPU-bbcc-2, 1", [2, 1]),
        # What follows an entry that is none is ignored; so is one that stands twice.
        ("1,7,0", [1]),
        ("1,1,0", [1]),
    ],
)
def test_visible_gpus_are_those_that_cuda_sees(asked, numbers):
    environment = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    found = visible(GPUS, environment)
    assert found is not None
    assert [gpu.index for gpu in found] == numbers


def test_parts_of_gpus_are_not_judged():
    assert visible(GPUS, {"CUDA_VISIBLE_DEVICES": "MIG-4f0e"}) is None


def test_processes_are_named_as_far_as_they_can_be():
    hidden, named = 2**22 + 2, 2**22 + 1
    nvml = FakeNvml({0: [(os.getpid(), 3 * GIB // 2), (named, None), (hidden, 0)]})
    own, theirs, unknown = Driver(nvml).processes(GPUS[0])
    assert own.startswith(f"pid {os.getpid()} {Path(sys.executable).parent}")
    assert own.endswith("(1.5 GiB)")
    assert theirs == f"pid {named} theirs"
    assert unknown == f"pid {hidden} (a process that cannot be seen from here)"


def test_a_process_that_is_just_ending_is_waited_for():
    nvml = FakeNvml({0: [(1, 0)]}, leaves=2)
    assert busy(Driver(nvml), GPUS[:1]) == ""
    assert busy(Driver(FakeNvml({0: [(1, 0)]})), GPUS[:1], patience=0.0).startswith(
        "GPU 0 is in use by pid 1 "
    )


def launched(tmp_path: Path, nvml: FakeNvml, stem: str, **options: Any) -> tuple[Any, Path]:
    case = replace(make_case(tmp_path, 'env > "$LORA_SUITE_RUN_DIR/environment"; exit 3'), stem=stem)
    run_dir = tmp_path / "smoke" / "20260301-120000-abc" / stem / "1"
    launcher = LocalLauncher(driver=Driver(nvml), **options)
    planned = PlannedRun(case=stem, repeat=1, pair="fsdp2", arm="lora")
    return launcher.run(case, planned, run_dir, keep=False, poll=lambda look, line: None), run_dir


def test_a_run_on_a_gpu_in_use_is_refused_with_the_processes_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr("lora_suite.launch.gpus._PATIENCE_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "60"]) as other:
        nvml = FakeNvml({1: [(other.pid, 2 * GIB)]})
        ended, run_dir = launched(tmp_path, nvml, "sft-tiny-llama-1n1g-fsdp2")
        other.kill()
    assert (ended.how, ended.status) == ("failed", 3)
    assert ended.message == f"not started: GPU 1 is in use by pid {other.pid} sleep 60 (2.0 GiB)"
    assert not (run_dir / "environment").exists()
    record = RunRecord.read(RunDir(run_dir).record)
    assert record.ended == ended


@pytest.mark.parametrize(
    ("stem", "visible_devices"),
    [
        # Another GPU than those that may be used is in use.
        ("sft-tiny-llama-1n1g-fsdp2", "0"),
        # A case of CPU processes uses none.
        ("sft-tiny-llama-1n1c-fsdp2", "1"),
    ],
)
def test_a_run_that_does_not_use_the_gpu_is_started(tmp_path, monkeypatch, stem, visible_devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    ended, run_dir = launched(tmp_path, FakeNvml({1: [(1, 0)]}), stem)
    assert ended.status == 3
    assert (run_dir / "environment").exists()


def test_a_launcher_on_some_gpus_shows_its_runs_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    launcher = LocalLauncher(driver=Driver(FakeNvml({})))
    assert launcher.devices() == ["GPU-bbcc-2", "GPU-bbbb-1"]
    assert launcher.on(["GPU-bbbb-1"]).devices() == ["GPU-bbbb-1"]
    _, run_dir = launched(
        tmp_path, FakeNvml({2: [(1, 0)]}), "sft-tiny-llama-1n1g-fsdp2", devices=["GPU-bbbb-1"]
    )
    assert "CUDA_VISIBLE_DEVICES=GPU-bbbb-1" in (run_dir / "environment").read_text().splitlines()


def test_a_run_tells_the_tracker_its_suite_run_and_arm(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setenv("WANDB_TAGS", "mine")
    _, run_dir = launched(tmp_path, FakeNvml({}), "sft-tiny-llama-1n1c-fsdp2")
    variables = (run_dir / "environment").read_text().splitlines()
    assert "WANDB_RUN_GROUP=smoke-20260301-120000-abc" in variables
    assert "WANDB_TAGS=mine" in variables
