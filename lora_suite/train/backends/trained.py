# SPDX-License-Identifier: Apache-2.0
"""What backends leave to what they train: adapters, or every weight."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from lora_suite.train.lora.bank import AdapterBank


class Trained(Protocol):
    """Gradients, norm and optimizer of what trains; the methods are an `AdapterBank`'s."""

    def sync_gradients(self) -> None:
        """Finish the reduction of gradients over ranks."""
        ...

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the norm before."""
        ...

    def step(self, lr: float) -> None:
        """Update what trains."""
        ...

    def trainable_parameters(self) -> int:
        """Parameters of the whole model."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's part and its optimizer state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        ...


class TrainedBackend:
    """The part of a backend that is what it trains; see `lora_suite.train.backends.base.Backend`.

    slow_path_reason: set by whoever chose the plain path.
    """

    def __init__(self, trained: Trained) -> None:
        self.slow_path_reason: str | None = None
        self.bank = trained if isinstance(trained, AdapterBank) else None
        self._trained = trained

    def sync_gradients(self) -> None:
        """Finish the reduction of gradients; FSDP2 has reduced those of sharded parameters on the way."""
        self._trained.sync_gradients()

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the global norm before."""
        return self._trained.clip_gradients(max_norm)

    def optimizer_step(self, lr: float) -> None:
        """Update what trains and clear the gradients."""
        self._trained.step(lr)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Within it the model computes as if it had no adapters."""
        if self.bank is None:
            raise RuntimeError("full SFT has no adapters to switch off")
        return self.bank.disabled()

    def trainable_parameters(self) -> int:
        """Trainable parameters of the whole model."""
        return self._trained.trainable_parameters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what trains and its optimizer state: references, to be saved at once."""
        return self._trained.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank of the same layout."""
        self._trained.load_state_dict(state)
