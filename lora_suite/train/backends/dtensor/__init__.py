# SPDX-License-Identifier: Apache-2.0
"""The dtensor backend: transformers models under FSDP2 and tensor parallelism, or on its fast path."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from lora_suite.blueprint.facts import Blueprint
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.build import build as build_plain

__all__ = ["build"]


def build(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> Backend:
    """Build the backend of a recipe on this rank, by the fast path where there is a GPU and it can be taken.

    `torch.distributed` must be initialised. Raises ConfigError like either path's own build.
    """
    if device.type == "cuda" and recipe.policy.dtensor_cfg.fast_path == "auto":
        memory = torch.cuda.get_device_properties(device).total_memory
        reason = fast.refusal(recipe, blueprint, memory)
        if reason is None:
            return fast.build(recipe, recipe_path, blueprint, device, gpu=True)
        if dist.get_rank() == 0:
            print(f"the fast path is not taken: {reason}")
    return build_plain(recipe, recipe_path, blueprint, device)
