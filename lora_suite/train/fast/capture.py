# SPDX-License-Identifier: Apache-2.0
"""One micro batch's forward and backward as a CUDA graph, replayed on new rows of the same shape.

A step of a small model is thousands of kernels of a few microseconds, which Python cannot launch as fast as a
GPU runs them. A graph is launched once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lora_suite.train.batch import MicroBatch

Compute = Callable[..., torch.Tensor]
"""From a micro batch's `tensors` to the summed loss, detached, with gradients accumulated on the way."""

_WARM_UP = 3
"""Passes before a capture: compilation, library handles and autotuning must not happen while recording."""


class NotCaptured(RuntimeError):
    """What a pass does cannot be recorded; the text is what torch said of it."""


class CapturedPass:
    """`compute` for one shape of micro batch. Reads its inputs, writes its loss and gradients in place.

    example: a micro batch of that shape, packed ones with as many segments as all that come, for warming up
    and capturing. clear: drops the gradients that these passes leave. parameters: whose gradients it writes:
    to buffers of its own where they have none when it is captured, else it adds to those that are there.
    pool: of `torch.cuda.graph_pool_handle`, memory to share with other passes; when one of them has run,
    this one's results are overwritten, but for the loss that it returned and the gradients.

    Raises NotCaptured where `compute` ran by itself, but could not be recorded; whatever it raises by itself
    otherwise.
    """

    def __init__(
        self,
        compute: Compute,
        example: MicroBatch,
        clear: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        pool: Any,
    ) -> None:
        self._inputs = [tensor.clone() for tensor in example.tensors]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                clear()
                compute(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        clear()
        self._graph = torch.cuda.CUDAGraph()
        try:
            self._loss = self._record(compute, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotCaptured(str(error).strip().partition("\n")[0]) from error
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]

    def _record(self, compute: Compute, pool: Any) -> torch.Tensor:
        # What other threads do meanwhile, such as NCCL's watch over earlier collectives, is not recorded. A
        # recording that fails does not set the stream back.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
        ):
            return compute(*self._inputs)

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        """Run the graph on a batch of the captured shape; return its summed loss."""
        for ours, tensor in zip(self._inputs, batch.tensors, strict=True):
            ours.copy_(tensor)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss.clone()
