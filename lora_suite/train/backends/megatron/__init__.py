# SPDX-License-Identifier: Apache-2.0
"""megatron-core's GPTModel under tensor, sequence and pipeline parallelism, without TransformerEngine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lora_suite.blueprint.facts import Blueprint
    from lora_suite.config.schema import Recipe
    from lora_suite.train.backends.base import Backend

# What megatron-core says to everyone who runs it without TransformerEngine and apex, or on a current torch.
EXPECTED_WARNINGS = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"full scope is deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
)
# A hint about streams of CUDA.
EXPECTED_WARNINGS_ON_CPU = (r"When using (async grad allreduce|sequence parallelism) it is recommended",)


def build(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> Backend:
    """Build this rank's part of a recipe's model, after `init_process_group`: `construct.build_backend`."""
    on_cpu = device.type == "cpu"
    for message in EXPECTED_WARNINGS + (EXPECTED_WARNINGS_ON_CPU if on_cpu else ()):
        warnings.filterwarnings("ignore", message)
    with _without_compiler() if on_cpu else nullcontext():
        from lora_suite.train.backends.megatron.construct import build_backend
    return build_backend(recipe, recipe_path, blueprint, device)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Import megatron-core without torch's compiler, which no function that runs on a CPU here makes use of.

    It decorates functions with `torch.compile` when it is imported; that alone loads the compiler, a third of
    the start-up time.
    """
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before
