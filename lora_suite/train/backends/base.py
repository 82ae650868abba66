# SPDX-License-Identifier: Apache-2.0
"""What the training loop needs of a backend, and nothing else.

The loop owns steps, data, learning rate, metrics, checkpoints. A backend owns the model, its parallel layout,
its gradients and its optimizer. Gradients are those of

    sum over the global batch's supervised tokens of the token loss  /  number of those tokens,

whatever the micro batch, data parallel or tensor parallel size (averaging averages is the classic mistake,
https://github.com/huggingface/transformers/pull/34191).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lora_suite.train.batch import MicroBatch
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.topology import Topology

NO_GPU = "there is no GPU"
"""Why no fast path is taken on a CPU, whatever the recipe asks for."""


class Backend(Protocol):
    """One model, split over the ranks of a topology, and what trains it.

    bank: the adapters, or None for full SFT. slow_path_reason: why the backend's fast path is not taken, with
    the key that decides; None where it is. It may change while training, where a shape cannot take it. Every
    rank calls every method, in the same order.
    """

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        ...

    topology: Topology
    bank: AdapterBank | None
    slow_path_reason: str | None

    def forward_backward(self, batches: Sequence[MicroBatch], global_tokens: int) -> torch.Tensor:
        """Accumulate gradients over this rank's micro batches.

        batches: the rows of this data-parallel rank, on its device (equal on ranks of equal dp index).
        global_tokens: supervised tokens of the whole global batch. Returns the summed token loss of this
        data-parallel rank: a detached scalar on the device, equal on all its tp and pp ranks. Waits for
        nothing on the host.
        """
        ...

    def sync_gradients(self) -> None:
        """Finish the reduction of gradients over data parallel (and of replicated factors over tp) ranks."""
        ...

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm` (None: leave them); return the global norm before, as a scalar."""
        ...

    def optimizer_step(self, lr: float) -> None:
        """Update the trainable parameters with this learning rate and clear the gradients."""
        ...

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Summed token loss of this data-parallel rank's rows, dropout off; no gradients."""
        ...

    def adapters_off(self) -> AbstractContextManager[None]:
        """Within it the model computes as if it had no adapters. Only called where `bank` is set."""
        ...

    def trainable_parameters(self) -> int:
        """Trainable parameters of the whole model, counted over its shards, replicas once."""
        ...

    def frozen_fingerprint(self) -> str:
        """Hash of this rank's part of the frozen weights, bit by bit; "" where nothing is frozen."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's trainable parameters and optimizer state, for `torch.save`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank of the same layout; a missing key is a KeyError."""
        ...
