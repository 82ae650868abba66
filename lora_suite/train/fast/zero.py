# SPDX-License-Identifier: Apache-2.0
"""Full SFT of several data parallel ranks: weights whole on each, their update split.

That is ZeRO's first stage (arXiv 1910.02054), and what the second saves comes with it. Weights lie in flat
buckets. As soon as the backward pass has all gradients of a bucket, they are sent: each rank gets the sum of
its part, while the pass goes on below. So no rank ever has all gradients. A rank updates its part of every
bucket, and a bucket is gathered while later ones are updated. The sending is part of the captured pass:
NCCL's collectives can be captured like kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lora_suite.train.topology import Axis

# The names that torch 2.13 gives them; the others still work there, with a warning.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_ALIGNMENT = 64
"""Elements: where tensors begin in a bucket; matrix units ask for 16 bytes, caches for 128."""


class Bucket:
    """Parameters that are reduced and gathered together: views of one flat buffer from now on.

    `weight`: this rank's part of it; `gradient`: of the gradient's sum over ranks, in float32 (or the
    weights' own precision where that is wider).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dp: Axis) -> None:
        self.parameters = list(parameters)
        self._spans: list[tuple[int, int]] = []
        end = 0
        for parameter in self.parameters:
            self._spans.append((end, end + parameter.numel()))
            end += parameter.numel() + -parameter.numel() % _ALIGNMENT
        end += -end % (dp.size * _ALIGNMENT)
        first = self.parameters[0]
        self.flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters, self._views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        mine = slice(dp.index * (end // dp.size), (dp.index + 1) * (end // dp.size))
        self.weight = self.flat[mine]
        wide = torch.promote_types(first.dtype, torch.float32)
        self.gradient = torch.zeros(end // dp.size, dtype=wide, device=first.device)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[start:stop].view(parameter.shape)
            for parameter, (start, stop) in zip(self.parameters, self._spans, strict=True)
        ]

    def take(self) -> torch.Tensor:
        """The gradients of all parameters as a flat buffer of their own; the parameters' are dropped."""
        gradients = [parameter.grad for parameter in self.parameters]
        flat = torch.empty_like(self.flat, dtype=self.gradient.dtype)
        stops = [0, *(stop for _, stop in self._spans)]
        starts = [*(start for start, _ in self._spans), len(flat)]
        for stop, start in zip(stops, starts, strict=True):
            flat[stop:start].zero_()
        for view, gradient in zip(self._views(flat), gradients, strict=True):
            assert gradient is not None, "every parameter is part of every pass"
            view.copy_(gradient)
        for parameter in self.parameters:
            parameter.grad = None
        return flat


class ShardedWeights:
    """This rank's part of every bucket; see `lora_suite.train.fast.masters.Weights`.

    buckets: all parameters, each once, in groups whose gradients come together. replicas: positions of the
    buckets that all tensor parallel ranks hold alike.
    """

    together = 1
    """A bucket can be gathered as soon as it is updated."""

    def __init__(
        self, buckets: Sequence[Sequence[nn.Parameter]], replicas: Sequence[int], shards: Axis
    ) -> None:
        self.buckets = [Bucket(parameters, shards) for parameters in buckets]
        self.tensors = [bucket.weight for bucket in self.buckets]
        self.replicas = tuple(replicas)
        self.shards = shards
        sizes = [sum(parameter.numel() for parameter in bucket) for bucket in buckets]
        self.replicated = sum(sizes[index] for index in self.replicas)
        self.split = sum(sizes) - self.replicated
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._sending: tuple[dist.Work, torch.Tensor] | None = None
        self._gathering: list[dist.Work] = []
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._arrived, index)
                )

    def _arrived(self, index: int, _: torch.Tensor) -> None:
        """Count a bucket's gradients; send them when the last is there."""
        self._missing[index] -= 1
        if self._missing[index]:
            return
        bucket = self.buckets[index]
        self._missing[index] = len(bucket.parameters)
        flat = bucket.take()
        # One at a time, so that no more than two buckets are held besides the parts.
        self.reduced()
        work = _reduce_scatter(bucket.gradient, flat, group=self.shards.group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._sending = work, flat

    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the last pass' sums, in float32."""
        return [bucket.gradient for bucket in self.buckets]

    def reduced(self) -> None:
        """Wait (on the device) for what is being sent."""
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    def publish(self, part: slice) -> None:
        """Begin to gather the buckets of updated parts."""
        for bucket in self.buckets[part]:
            work = _all_gather(bucket.flat, bucket.weight, group=self.shards.group, async_op=True)
            assert work is not None, "this rank is in the group"
            self._gathering.append(work)

    def published(self) -> None:
        """Wait (on the device) for what is being gathered."""
        for work in self._gathering:
            work.wait()
        self._gathering.clear()
