# SPDX-License-Identifier: Apache-2.0
"""What a rank says when memory runs out: what it held, what was to be expected, and what to change."""

from __future__ import annotations

import torch

from lora_suite.blueprint import Blueprint
from lora_suite.blueprint.remedy import remedy
from lora_suite.blueprint.sharding import plan_memory
from lora_suite.config.schema import Recipe
from lora_suite.train.environment import peak_resident_gib
from lora_suite.train.process import device_memory

# What torch's allocator on the CPU says, and CUDA's driver where it is not torch that asks.
_SAID = ("can't allocate memory", "out of memory")


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, on the GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def explain_memory(recipe: Recipe, blueprint: Blueprint, device: torch.device, fast: bool) -> str:
    """One line: peaks of this rank, the memory model's estimate by part, and the key that helps by it.

    fast: whether the training was on its backend's fast path.
    """
    plan = plan_memory(recipe, blueprint, device_memory(device), fast)
    said = [f"{_peaks(device)} on this rank"]
    if plan.estimate is None:
        said.append("the model's shape is not known, so there is no estimate")
        return "; ".join(said)
    of = f" of the GPU's {plan.memory / 2**30:.1f} GiB" if plan.memory is not None else ""
    said.append(f"the memory model expected {plan.estimate}{of}")
    change = remedy(recipe, blueprint, plan, fast)
    said.append(
        str(change)
        if change is not None
        else "no key makes it a tenth smaller by the model: use a smaller model, or GPUs with more memory"
    )
    return "; ".join(said)


def _peaks(device: torch.device) -> str:
    if device.type != "cuda":
        return f"peak {peak_resident_gib():.2f} GiB resident"
    gib = 2**30
    allocated = torch.cuda.max_memory_allocated(device) / gib
    reserved = torch.cuda.max_memory_reserved(device) / gib
    return f"peak {allocated:.1f} GiB allocated, {reserved:.1f} reserved"
