# SPDX-License-Identifier: Apache-2.0
"""What a run ran on: equal in all that is `strict`, two runs may be compared; the rest is noted."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lora_suite
from lora_suite.config.schema import Recipe
from lora_suite.launch.code import commit_of
from lora_suite.launch.record import Environment
from lora_suite.train.nvml import Gpus

_PACKAGES = {"dtensor": ("transformers",), "megatron": ("megatron-core", "transformer-engine")}
_SOFT_PACKAGES = ("numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "peft", "datasets")
_ALLOCATOR_FLAGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_ALGO",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


def fingerprint(recipe: Recipe, gpus: Gpus) -> Environment:
    """The environment of this process, which stands for all of the run's."""
    on_gpu = torch.cuda.is_available()
    strict: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else cpu_model(),
        "world_size": recipe.world_size,
        "driver": gpus.driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES[recipe.policy.backend]},
        "dtype": recipe.policy.precision,
        "float32_matmul": torch.get_float32_matmul_precision(),
        "threads": None if on_gpu else torch.get_num_threads(),
        **{flag: os.environ.get(flag) for flag in _ALLOCATOR_FLAGS},
    }
    soft = {
        "host": platform.node(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{name: _version(name) for name in _SOFT_PACKAGES},
    }
    commit = commit_of(Path(lora_suite.__file__).parent)
    return Environment(strict=strict, soft={**soft, "code": commit} if commit is not None else soft)


def health(gpus: Gpus) -> dict[str, Any]:
    """How this node does right now: its load average, and its GPUs' clocks, temperatures and throttling."""
    return {"load_average": list(os.getloadavg()), "gpus": gpus.health()}


def peak_resident_gib() -> float:
    """Largest memory that this process has had resident so far, in GiB."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def cpu_model() -> str:
    """Name of the CPU as the kernel gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
