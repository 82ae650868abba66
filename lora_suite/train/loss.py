# SPDX-License-Identifier: Apache-2.0
"""The loss of both backends: a sum of token losses, divided once by the global batch's supervised tokens."""

from __future__ import annotations

import torch
from torch.nn import functional

from lora_suite.train.batch import IGNORED


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in nats over the positions that carry loss; 0 (never NaN) where there are none.

    logits: [rows, length, vocabulary], computed with in float32 at least. labels: [rows, length], already
    shifted, IGNORED where a position carries no loss.
    """
    logits = logits.flatten(0, -2)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
