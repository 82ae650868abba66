# SPDX-License-Identifier: Apache-2.0
"""A look at a few more steps with torch's profiler, after the training has been measured."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lora_suite.launch.record import RunDir
from lora_suite.launch.traces import read_trace
from lora_suite.train.topology import Topology

# Steps that the profiler takes to get going; they are not in the trace.
_WARMUP = 1


def profile_steps(step: Callable[[], None], steps: int, topology: Topology, files: RunDir) -> None:
    """Make `steps` steps (and one before them) and leave rank 0's trace and kernels in the run directory.

    step: makes one step and waits for the device. Every rank calls it, as the steps are collective; only
    rank 0 looks, so the others show how long it waited for them. Writes `trace.json.gz` (for Perfetto or
    chrome://tracing) and `kernels.json` (`lora_suite.launch.traces.Profile`).
    """
    if topology.rank != 0:
        for _ in range(_WARMUP + steps):
            step()
        return
    activities = [ProfilerActivity.CPU]
    if topology.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=_WARMUP, active=steps, repeat=1)
    ) as profiler:
        for _ in range(_WARMUP + steps):
            step()
            profiler.step()
    files.trace.parent.mkdir(exist_ok=True)
    _write_trace(profiler, files.trace)
    read_trace(files.trace).write(files.kernels)


def _write_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Export the trace compressed, under its name only when it is whole."""
    with TemporaryDirectory(dir=path.parent) as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, path.name)
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        packed.replace(path)
