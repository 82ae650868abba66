# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a large vocabulary, whole or split over ranks, without storing float32 logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from lora_suite.train.batch import IGNORED
from lora_suite.train.topology import Axis

ELEMENTS_AT_ONCE = 2**26
"""Logits that are held in float32 at a time: 256 MiB."""
WHOLE = Axis(0, 1)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor, vocabulary: Axis = WHOLE) -> torch.Tensor:
    """Summed cross-entropy in nats over the positions that carry loss; 0 where there are none.

    logits: [rows, length, this rank's part of the vocabulary] in the model's dtype. labels: [rows, length],
    already shifted, IGNORED where a position carries no loss. vocabulary: the ranks over which it is split in
    equal parts, all of which get the whole loss. Computed, forward and backward, in float32 (float64 for
    float64 logits); beside the logits and their gradient only a part of them is ever held in that dtype. One
    collective forward, of two numbers a position, and none backward.
    """
    apply = cast(Callable[..., torch.Tensor], _TokenLossSum.apply)
    return apply(logits.flatten(0, -2), labels.flatten(), vocabulary)


class _TokenLossSum(torch.autograd.Function):
    """logits [tokens, part of the vocabulary], labels [tokens] to Σ logsumexp(logits) - logits[label].

    The gradient is softmax(logits) - onehot(label) at supervised tokens and zero elsewhere, from the saved
    logits and the logsumexp over the whole vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocabulary: Axis) -> torch.Tensor:
        supervised = labels != IGNORED
        classes = labels - vocabulary.index * logits.shape[-1]
        own = supervised & (classes >= 0) & (classes < logits.shape[-1])
        classes = classes.where(own, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        # Of each token: the logsumexp of these logits, and the label's logit (0 where another rank has it).
        tokens = torch.empty(2, len(labels), dtype=dtype, device=logits.device)
        for part in _parts(logits):
            values = logits[part].to(dtype)
            tokens[0, part] = values.logsumexp(-1)
            tokens[1, part] = values.gather(-1, classes[part, None]).squeeze(-1).where(own[part], 0.0)
        normalisers, chosen = _over_ranks(tokens, vocabulary)
        ctx.save_for_backward(logits, classes, supervised, own, normalisers)
        return (normalisers - chosen).where(supervised, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, classes, supervised, own, normalisers = ctx.saved_tensors
        weights = gradients[0] * supervised
        result = torch.empty_like(logits)
        for part in _parts(logits):
            softmax = (logits[part].to(normalisers.dtype) - normalisers[part, None]).exp_()
            index = classes[part, None]
            softmax.scatter_(-1, index, softmax.gather(-1, index) - own[part, None].to(softmax.dtype))
            result[part] = softmax.mul_(weights[part, None])
        return result, None, None


def _over_ranks(tokens: torch.Tensor, vocabulary: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """logsumexp and label's logit [tokens] over the whole vocabulary, from every rank's [2, tokens]."""
    if vocabulary.size == 1:
        return tokens[0], tokens[1]
    parts = [torch.empty_like(tokens) for _ in range(vocabulary.size)]
    dist.all_gather(parts, tokens, group=vocabulary.group)
    gathered = torch.stack(parts)
    return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)


def _parts(logits: torch.Tensor) -> list[slice]:
    """Slices of tokens, each with at most ELEMENTS_AT_ONCE logits (at least one token)."""
    tokens, vocabulary = logits.shape
    step = max(1, ELEMENTS_AT_ONCE // vocabulary)
    return [slice(start, start + step) for start in range(0, tokens, step)]
