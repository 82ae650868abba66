# SPDX-License-Identifier: Apache-2.0
"""What models of the fast path have in common: layers that are compiled, or called as they are written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lora_suite.train.models.attention import Blocks


class LayeredModel(nn.Module):
    """Embedding, `layers`, last norm; `forward` gives the states that the head multiplies."""

    layers: nn.ModuleList

    def forward(self, input_ids: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """input_ids [rows, length] to normalised states [rows, length, hidden]; [1, slots] with `blocks`."""
        return self._through(input_ids, blocks, self.layers)

    def states(self, input_ids: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """The same by the layers' code as it is written, where they are compiled."""
        return self._through(input_ids, blocks, [layer.forward for layer in self.layers])

    @abstractmethod
    def _through(
        self, input_ids: torch.Tensor, blocks: Blocks | None, layers: Iterable[Callable[..., Any]]
    ) -> torch.Tensor:
        """`forward`, by these layers."""
