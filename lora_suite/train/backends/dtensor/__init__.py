# SPDX-License-Identifier: Apache-2.0
"""The dtensor backend: transformers models under FSDP2 and tensor parallelism, or on its fast path."""

from __future__ import annotations

from pathlib import Path

import torch

from lora_suite.blueprint.facts import Blueprint
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import NO_GPU, Backend
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.build import build as build_plain

__all__ = ["build"]


def build(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> Backend:
    """Build the backend of a recipe on this rank, by the fast path where it can be taken.

    `torch.distributed` must be initialised. Raises ConfigError like either path's own build.
    """
    reason = _slow_path_reason(recipe, blueprint, device)
    if reason is None:
        return fast.build(recipe, recipe_path, blueprint, device, gpu=True)
    backend = build_plain(recipe, recipe_path, blueprint, device)
    backend.slow_path_reason = reason
    return backend


def _slow_path_reason(recipe: Recipe, blueprint: Blueprint, device: torch.device) -> str | None:
    if device.type != "cuda":
        return NO_GPU
    if recipe.policy.dtensor_cfg.fast_path == "off":
        return "policy.dtensor_cfg.fast_path is off"
    return fast.refusal(recipe, blueprint, torch.cuda.get_device_properties(device).total_memory)
