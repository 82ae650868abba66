# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel of the token losses and their gradient, which replaces the logits: two passes over a row.

A row of logits is read from memory once and found in the GPU's cache the second time. Loaded where Triton and
a GPU are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lora_suite.train.batch import IGNORED

_BLOCK = 8192
_WARPS = 8
_STAGES = 3
_IGNORED = tl.constexpr(IGNORED)


@triton.jit  # type: ignore[untyped-decorator]
def _token_loss(logits, labels, weight, losses, vocabulary, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    label = tl.load(labels + row)
    lane = tl.arange(0, block)
    if label == _IGNORED:
        for start in range(0, vocabulary, block):
            zeros = tl.zeros((block,), values.dtype.element_ty)
            tl.store(values + start + lane, zeros, mask=start + lane < vocabulary)
        tl.store(losses + row, 0.0)
    else:
        largest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
        for start in range(0, vocabulary, block):
            inside = start + lane < vocabulary
            x = tl.load(values + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            now = tl.maximum(largest, tl.max(x, 0))
            total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), 0)
            largest = now
        normaliser = largest + tl.log(total)
        tl.store(losses + row, normaliser - tl.load(values + label).to(tl.float32))
        factor = tl.load(weight)
        # Everyone has the label's logit before anyone replaces it.
        tl.debug_barrier()
        for start in range(0, vocabulary, block):
            column = start + lane
            x = tl.load(values + column, mask=column < vocabulary, other=0.0).to(tl.float32)
            gradient = (tl.exp(x - normaliser) - tl.where(column == label, 1.0, 0.0)) * factor
            tl.store(values + column, gradient.to(values.dtype.element_ty), mask=column < vocabulary)


def chunk_loss(
    logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`head_loss.chunk_loss` of logits of at most float32; their memory holds the gradient afterwards."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _token_loss[(len(logits),)](
        logits, labels, weight, losses, logits.shape[1], logits.stride(0),
        block=_BLOCK, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return losses.sum(), logits
