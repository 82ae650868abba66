# SPDX-License-Identifier: Apache-2.0
"""The head's product and the token losses together, a few rows at a time, so that logits are never stored.

A chunk of logits is computed, its loss and its gradient taken at once, and dropped: forward does the work of
both directions, backward only multiplies by the gradient that comes from above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from lora_suite.train.batch import IGNORED
from lora_suite.train.fast.collectives import TensorParallel

CHUNK = 512
"""Tokens whose logits are held at a time: 125 MiB of bfloat16 for a vocabulary of 128,256."""

TRAINED_CHUNK = 2048
"""The same where the head trains: each chunk is added to its gradient, which is rounded, read and written
whole each time. In bfloat16 one product is 0.17 % off, a sum over 128 chunks 1.4 %, over 16 0.48 %."""

ChunkLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def chunk_loss(
    logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of a chunk in nats, and `weight` times its gradient by the logits.

    logits [tokens, vocabulary]; labels [tokens], IGNORED where there is no loss; weight a scalar. Computed in
    float32 (float64 for float64 logits); the gradient is in the logits' dtype.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    supervised = labels != IGNORED
    classes = labels.where(supervised, 0)[:, None]
    normaliser = values.logsumexp(-1, keepdim=True)
    losses = (normaliser - values.gather(-1, classes)).squeeze(-1).where(supervised, 0.0)
    chosen = torch.arange(values.shape[1], device=values.device)[None] == classes
    gradient = ((values - normaliser).exp() - chosen.to(values.dtype)) * (supervised * weight)[:, None]
    return losses.sum(), gradient.to(logits.dtype)


def chunk_loss_of(tp: TensorParallel) -> ChunkLoss:
    """`chunk_loss` of logits that are split over ranks by vocabulary, in equal parts and in their order.

    Each rank has the loss of the whole vocabulary and the gradient by its own logits. What crosses ranks are
    two numbers a token: the normaliser of each rank's part, and the label's logit, where a rank has it.
    """
    if tp.size == 1:
        return chunk_loss

    def of_part(
        logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        width = values.shape[1]
        supervised = labels != IGNORED
        classes = labels - tp.index * width
        mine = supervised & (classes >= 0) & (classes < width)
        places = classes.where(mine, 0)[:, None]
        own = torch.stack([values.logsumexp(-1), values.gather(-1, places).squeeze(-1).where(mine, 0.0)])
        everyone = tp.gather(own)
        normaliser, label = everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)
        losses = (normaliser - label).where(supervised, 0.0)
        chosen = (torch.arange(width, device=values.device)[None] == places) & mine[:, None]
        gradient = (values - normaliser[:, None]).exp() - chosen.to(values.dtype)
        return losses.sum(), (gradient * (supervised * weight)[:, None]).to(logits.dtype)

    return of_part


class _HeadLoss(torch.autograd.Function):
    """states [tokens, hidden], head [vocabulary, hidden], labels [tokens] to the summed loss."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        of_chunk: ChunkLoss,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=weight.dtype, device=states.device)
        d_states = torch.empty_like(states)
        d_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        size = CHUNK if d_head is None else TRAINED_CHUNK
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            loss, gradient = of_chunk(states[part] @ head.t(), labels[part], weight)
            total += loss
            torch.mm(gradient, head, out=d_states[part])
            if d_head is not None:
                d_head.addmm_(gradient.t(), states[part])
            # Before the next chunk's logits: a kernel's gradient stands where the logits were.
            del gradient
        ctx.save_for_backward(d_states, d_head)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_states, d_head = ctx.saved_tensors
        # The caller's weight is in the gradients already, so the sum's own gradient must be 1.
        return d_states, d_head, None, None, None


def head_loss(
    states: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    of_chunk: ChunkLoss = chunk_loss,
) -> torch.Tensor:
    """Summed token loss (a scalar); `backward()` on it gives `weight` times its gradients.

    states [tokens, hidden]; head [vocabulary, hidden]; labels [tokens], already shifted; weight: a scalar
    tensor in float32 (float64), 1 over the global batch's supervised tokens. of_chunk: `chunk_loss`, perhaps
    compiled; or `chunk_loss_of` ranks that have a part of the head each (then the states' gradient is a part
    of a sum, too).
    """
    apply = cast(Callable[..., torch.Tensor], _HeadLoss.apply)
    return apply(states, head, labels, weight, of_chunk)


@torch.no_grad()
def evaluate_loss(
    states: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, of_chunk: ChunkLoss = chunk_loss
) -> torch.Tensor:
    """Summed token loss without gradients; arguments as of `head_loss`."""
    one = torch.ones((), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
    parts = [
        of_chunk(states[start : start + CHUNK] @ head.t(), labels[start : start + CHUNK], one)[0]
        for start in range(0, len(states), CHUNK)
    ]
    return torch.stack(parts).sum()
