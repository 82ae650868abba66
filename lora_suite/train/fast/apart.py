# SPDX-License-Identifier: Apache-2.0
"""Full SFT where ranks hold different routed experts: these are updated apart from all other weights."""

from __future__ import annotations

import torch

from lora_suite.train.fast.masters import Weights
from lora_suite.train.topology import Axis


class ExpertsApart:
    """All weights that a rank updates; see `lora_suite.train.fast.masters.Weights`.

    rest: what all data parallel ranks hold alike, and share the update of. experts: those of this rank, which
    have seen the tokens of all of `ep`. So nothing of them is summed over `ep`; the ranks that hold the same
    ones share their update. Over `rest.shards` every weight then is updated once.
    """

    together = 1
    """What is handed on one by one in one of them is so in both."""

    def __init__(self, rest: Weights, experts: Weights, ep: Axis) -> None:
        self._rest = rest
        self._experts = experts
        self.tensors = [*rest.tensors, *experts.tensors]
        self.replicas = rest.replicas
        self.shards = rest.shards
        self.split = rest.split + experts.split * ep.size
        self.replicated = rest.replicated

    def gradients(self) -> list[torch.Tensor]:
        """Those of both."""
        return [*self._rest.gradients(), *self._experts.gradients()]

    def reduced(self) -> None:
        """Finish what a backward pass has begun to send."""
        self._rest.reduced()
        self._experts.reduced()

    def publish(self, part: slice) -> None:
        """Begin to hand on tensors that were updated."""
        start, stop, _ = part.indices(len(self.tensors))
        count = len(self._rest.tensors)
        self._rest.publish(slice(min(start, count), min(stop, count)))
        self._experts.publish(slice(max(start - count, 0), max(stop - count, 0)))

    def published(self) -> None:
        """Finish handing on."""
        self._rest.published()
        self._experts.published()
