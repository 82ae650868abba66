# SPDX-License-Identifier: Apache-2.0
"""This process: its device, its process group, its random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lora_suite.config import ConfigError
from lora_suite.train.topology import Topology

# Long enough for a peer to load weights, short enough that a dead one does not hold a machine.
_TIMEOUT_MINUTES = 30


def local_device() -> torch.device:
    """The GPU of this local rank, or the CPU where there is no GPU.

    Raises ConfigError on a machine with GPUs, but fewer than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus:
        raise ConfigError(
            f"cluster.gpus_per_node: {ranks} GPUs are asked for, and this process sees {gpus}; set it to at "
            f"most {gpus}, or look at CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """A GPU's model as CUDA names it; empty of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def device_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None of a CPU, whose memory is not the training's alone."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The default process group of the ranks that torchrun started; left behind if the body fails.

    A failed rank must not wait for its peers, who wait for it: it is torchrun that ends them. On GPUs it is
    left behind in any case: NCCL ends a communicator when the last graph that has recorded it is gone, and
    graphs live as long as what they compute on. The process ends next, and takes all of it along.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timedelta(minutes=_TIMEOUT_MINUTES),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    if device.type == "cpu":
        dist.destroy_process_group()


def seed_ranks(seed: int, topology: Topology) -> None:
    """Seed the default generators, from which dropout draws.

    Tensor parallel ranks get equal seeds, so that masks agree where an activation is replicated; data
    parallel ranks and pipeline stages get different ones.
    """
    stream = topology.dp.index * topology.pp.size + topology.pp.index
    torch.manual_seed(seed * 1_000_003 + stream)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the generators that `seed_ranks` seeds."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
