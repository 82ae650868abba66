# SPDX-License-Identifier: Apache-2.0
"""Whether adapters stay finite and grow no faster than an optimizer can make them, look by look."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lora_suite.train.lora.bank import AdapterBank

MOST_GROWTH = 10.0
"""Factor by which an adapter's norm may grow from one look to the next, a few steps later. Adam moves an
element by about the learning rate (https://github.com/pytorch/torchtitan/issues/421 is what happens where
something else moves it)."""


_PIECE = 32_768
"""Elements that are summed at once. A GPU sums a segment in one block of threads: the experts of a layer are
one factor of millions of elements, which would keep one of its processors busy and leave the others idle."""


class Growth:
    """Watches the norms of this rank's adapters, √(‖A‖² + ‖B‖²) of what it holds of them.

    A look costs one multiplication, one reduction by segments and one short copy to the host, for all
    adapters together.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        places = {adapter.name: place for place, adapter in enumerate(bank.adapters)}
        ends, adapter_of = [0], []
        for slot in bank.slots:
            pieces = [*range(ends[-1] + _PIECE, slot.stop, _PIECE), slot.stop]
            ends += pieces
            adapter_of += [places[slot.adapter.name]] * len(pieces)
        self._offsets = torch.tensor(ends, device=bank.master.device)
        self._adapter_of = np.array(adapter_of, dtype=np.intp)
        self.broken: dict[str, int] = {}
        self.grown: dict[str, int] = {}
        self._norms = self._measure()

    def look(self, step: int) -> None:
        """Compare with the last look; `broken` and `grown` hold the first step by which an adapter was."""
        before, self._norms = self._norms, self._measure()
        broken = ~np.isfinite(self._norms)
        with np.errstate(invalid="ignore"):
            grown = ~broken & (self._norms > MOST_GROWTH * before)
        for seen, adapters in ((self.broken, broken), (self.grown, grown)):
            for place in np.flatnonzero(adapters):
                seen.setdefault(self._bank.adapters[place].name, step)

    def _measure(self) -> npt.NDArray[np.float64]:
        """Norm of each adapter, in the bank's order."""
        squares = torch.segment_reduce(self._bank.master.square(), "sum", offsets=self._offsets, unsafe=True)
        of_pieces = squares.double().cpu().numpy()
        return np.sqrt(np.bincount(self._adapter_of, of_pieces, minlength=len(self._bank.adapters)))
