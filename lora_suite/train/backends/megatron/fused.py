# SPDX-License-Identifier: Apache-2.0
"""Adapters of fused linears as adapters of the linears that they hold, which other libraries know."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lora_suite.blueprint.shape import ModelShape
from lora_suite.train.backends.megatron.weights import LAYER_LINEARS, unstack

Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Whole factors (A [rank, in], B [out, rank]) by an adapter's name."""
MODULES = "decoder.layers."
HEAD = "output_layer"


def is_megatrons(name: str) -> bool:
    """Whether an adapter's name is Megatron's, not that of a transformers model's linear."""
    return name == HEAD or name.startswith(MODULES)


def canonical_factors(factors: Factors, shape: ModelShape) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Whole factors by Hugging Face's names: the same function, in which q, k, v (gate, up) have equal A.

    factors: of adapters with Megatron's names, whose B has its rows in the order of the whole fused linear;
    others are returned as they are. Raises KeyError for a Megatron name without a counterpart.
    """
    result = {}
    for name, (a, b) in factors.items():
        if name == HEAD:
            result["lm_head"] = (a, b)
        elif name.startswith(MODULES):
            layer, _, path = name.removeprefix(MODULES).partition(".")
            parts = LAYER_LINEARS[path]
            rows = unstack(path, b, shape) if len(parts) > 1 else (b,)
            for part, own in zip(parts, rows, strict=True):
                result[f"model.layers.{layer}.{part}"] = (a, own)
        else:
            result[name] = (a, b)
    return result
