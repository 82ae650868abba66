# SPDX-License-Identifier: Apache-2.0
"""Whether adapters stay finite and grow no faster than an optimizer can make them, step by step."""

from __future__ import annotations

import math

import torch

from lora_suite.train.lora.bank import AdapterBank

MOST_GROWTH = 10.0
"""Factor by which an adapter's norm may grow in one step. Adam moves an element by about the learning rate
(https://github.com/pytorch/torchtitan/issues/421 is what happens where something else moves it)."""


class Growth:
    """Watches the norms of this rank's adapters, √(‖A‖² + ‖B‖²) of what it holds of them.

    A step costs one multiplication, one reduction by segments and one short copy to the host, for all
    adapters together.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        ends = [0, *(slot.stop for slot in bank.slots)]
        self._offsets = torch.tensor(ends, device=bank.master.device)
        places = {adapter.name: place for place, adapter in enumerate(bank.adapters)}
        self._adapter_of = [places[slot.adapter.name] for slot in bank.slots]
        self.broken: dict[str, int] = {}
        self.grown: dict[str, int] = {}
        self._norms = self._measure()

    def after_step(self, step: int) -> None:
        """Compare with the step before; `broken` and `grown` hold the first step at which an adapter was."""
        before, self._norms = self._norms, self._measure()
        for adapter, old, new in zip(self._bank.adapters, before, self._norms, strict=True):
            if not math.isfinite(new):
                self.broken.setdefault(adapter.name, step)
            elif new > MOST_GROWTH * old:
                self.grown.setdefault(adapter.name, step)

    def _measure(self) -> list[float]:
        """Norm of each adapter, in the bank's order."""
        squares = torch.segment_reduce(
            self._bank.master.square(), "sum", offsets=self._offsets, unsafe=True
        ).tolist()
        totals = [0.0] * len(self._bank.adapters)
        for place, square in zip(self._adapter_of, squares, strict=True):
            totals[place] += square
        return [math.sqrt(total) for total in totals]
