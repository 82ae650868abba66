# SPDX-License-Identifier: Apache-2.0
"""The recipe's torch optimizer, the same for adapters and for full SFT."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_suite.config.schema import Optimizer


def build_optimizer(
    parameters: Sequence[torch.Tensor], config: Optimizer, *, fused: bool | None
) -> torch.optim.Optimizer:
    """Adam, AdamW, or SGD without momentum over `parameters`, as `policy.optimizer` says.

    fused: in place of the recipe's own value, which each caller may refine where it leaves the choice open.
    """
    kwargs = config.kwargs
    if config.name.endswith("SGD"):
        return torch.optim.SGD(
            list(parameters),
            lr=kwargs.lr,
            weight_decay=kwargs.weight_decay,
            foreach=kwargs.foreach,
            fused=fused,
        )
    kind = torch.optim.AdamW if config.name.endswith("AdamW") else torch.optim.Adam
    return kind(
        list(parameters),
        lr=kwargs.lr,
        betas=kwargs.betas,
        eps=kwargs.eps,
        weight_decay=kwargs.weight_decay,
        foreach=kwargs.foreach,
        fused=fused,
    )
