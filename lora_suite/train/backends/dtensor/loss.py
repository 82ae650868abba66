# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a large vocabulary in float32, without storing float32 logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from lora_suite.train.batch import IGNORED

ELEMENTS_AT_ONCE = 2**26
"""Logits that are held in float32 at a time: 256 MiB."""


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in nats over the positions that carry loss; 0 where there are none.

    logits: [rows, length, vocabulary] in the model's dtype. labels: [rows, length], already shifted, IGNORED
    where a position carries no loss. Computed, forward and backward, in float32 (float64 for float64 logits);
    beside the logits and their gradient only a part of them is ever held in that dtype.
    """
    apply = cast(Callable[..., torch.Tensor], _TokenLossSum.apply)
    return apply(logits.flatten(0, -2), labels.flatten())


class _TokenLossSum(torch.autograd.Function):
    """logits [tokens, vocabulary], labels [tokens] to the sum of logsumexp(logits) - logits[label].

    The gradient is softmax(logits) - onehot(label) at supervised tokens and zero elsewhere, from the saved
    logits and their logsumexp.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        supervised = labels != IGNORED
        classes = labels.where(supervised, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=logits.device)
        normalisers = torch.empty(len(labels), dtype=dtype, device=logits.device)
        for part in _parts(logits):
            values = logits[part].to(dtype)
            normalisers[part] = values.logsumexp(-1)
            chosen = values.gather(-1, classes[part, None]).squeeze(-1)
            total += (normalisers[part] - chosen).where(supervised[part], 0.0).sum()
        ctx.save_for_backward(logits, classes, supervised, normalisers)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, classes, supervised, normalisers = ctx.saved_tensors
        weights = gradients[0] * supervised
        result = torch.empty_like(logits)
        for part in _parts(logits):
            softmax = (logits[part].to(normalisers.dtype) - normalisers[part, None]).exp_()
            index = classes[part, None]
            softmax.scatter_(-1, index, softmax.gather(-1, index) - 1.0)
            result[part] = softmax.mul_(weights[part, None])
        return result, None


def _parts(logits: torch.Tensor) -> list[slice]:
    """Slices of tokens, each with at most ELEMENTS_AT_ONCE logits (at least one token)."""
    tokens, vocabulary = logits.shape
    step = max(1, ELEMENTS_AT_ONCE // vocabulary)
    return [slice(start, start + step) for start in range(0, tokens, step)]
