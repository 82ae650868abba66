# SPDX-License-Identifier: Apache-2.0
"""The unit of work that the data side hands to a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED = -100
"""Label of a position that carries no loss: prompt, padding, the last position of a row."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, padded on the right to one length.

    input_ids: int64 [rows, length]. labels: int64 [rows, length], already shifted: labels[i, t] is the token
    that position t must predict, or IGNORED. Padding is on the right and carries no loss, so causal attention
    needs no mask: no supervised position can see a padded one.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor

    @property
    def slots(self) -> int:
        """Padded token slots, rows × length."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on `device`."""
        return MicroBatch(
            self.input_ids.to(device, non_blocking=True), self.labels.to(device, non_blocking=True)
        )
