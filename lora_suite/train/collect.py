# SPDX-License-Identifier: Apache-2.0
"""Small Python values from every rank to every rank, outside the timed phases."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from lora_suite.train.topology import Topology

T = TypeVar("T")


def gather(topology: Topology, value: T) -> list[T]:
    """The value of every rank, in the order of ranks, on every rank. Every rank must call it."""
    if topology.world_size == 1:
        return [value]
    values: list[Any] = [None] * topology.world_size
    dist.all_gather_object(values, value)
    return values
