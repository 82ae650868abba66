# SPDX-License-Identifier: Apache-2.0
"""A step of the fast paths: each shape of micro batch is captured once, both ways, and replayed."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lora_suite.train.backends.trained import TrainedBackend
from lora_suite.train.batch import MicroBatch
from lora_suite.train.fast.capture import CapturedPass, Compute, NotCaptured
from lora_suite.train.fast.experts import FramedExperts
from lora_suite.train.fast.head_loss import ChunkLoss, chunk_loss
from lora_suite.train.fast.linears import FramedLinear, refresh
from lora_suite.train.fast.masters import MasterWeights
from lora_suite.train.fast.room import Room
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.models.attention import Blocks
from lora_suite.train.topology import Topology

_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Implementations of attention, the fastest on Hopper first; the first that can do what is asked is used."""


_MOST_COMPILED = 64
"""Kinds of layers times shapes of micro batches."""

Shape = tuple[int | torch.Size | None, ...]
"""What a pass is captured for: the length that packed rows fit into, and the shape of each tensor."""


def _span(batch: MicroBatch) -> int | None:
    """The length that a micro batch's packed rows fit into."""
    return None if batch.segments is None else Room.length(batch.segments)


def _shape(batch: MicroBatch) -> Shape:
    return _span(batch), *(tensor.shape for tensor in batch.tensors)


class GraphedBackend(TrainedBackend):
    """The part of `lora_suite.train.backends.base.Backend` that runs micro batches in training.

    trained: the adapters, or every weight. dtype: of the model. gpu: compile and capture; otherwise the same
    code runs as it is. of_chunk: of the head's loss, where it is split. A subclass says what the loss is, by
    `_loss`.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        trained: AdapterBank | MasterWeights,
        dtype: torch.dtype,
        *,
        gpu: bool,
        of_chunk: ChunkLoss = chunk_loss,
    ) -> None:
        super().__init__(trained)
        self.topology = topology
        self.model = model
        self._full = trained if isinstance(trained, MasterWeights) else None
        self._gpu = gpu
        wide = torch.promote_types(dtype, torch.float32)
        self._weight = torch.ones((), dtype=wide, device=topology.device)
        self._of_chunk = _compiled(of_chunk, wide) if gpu else of_chunk
        self._dtype = dtype
        self._captured: dict[Shape, CapturedPass] = {}
        self._uncaptured: set[Shape] = set()
        self._room = Room()
        # One graph at a time runs, and nothing reads what another leaves, so they can use the same memory.
        self._pool = torch.cuda.graph_pool_handle() if gpu else None
        framed = [module for module in model.modules() if isinstance(module, FramedLinear)]
        experts = [module for module in model.modules() if isinstance(module, FramedExperts)]
        self._leaves: list[nn.Parameter] = []
        if self.bank is not None:
            self._leaves = _leaves(self.bank, framed)
            for each in experts:
                self.bank.listeners.append(each.refresh)
                each.refresh()
            if framed:
                # The kernel multiplies in float32.
                in_kernel = gpu and dtype != torch.float64
                copy = _frame_copies(self.bank, framed) if in_kernel else partial(refresh, framed)
                self.bank.listeners.append(copy)
                copy()

    @abstractmethod
    def _loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, blocks: Blocks | None = None
    ) -> torch.Tensor:
        """Summed token loss of a micro batch, whose gradients are `_weight` times its own.

        blocks: of packed rows.
        """

    def forward_backward(self, batches: Sequence[MicroBatch], global_tokens: int) -> torch.Tensor:
        """Accumulate gradients over the micro batches; return their summed token loss."""
        self._weight.fill_(1.0 / global_tokens)
        losses = []
        if self._full is not None:
            self._full.begin()
        self._make_room(batches)
        for index, batch in enumerate(map(self._room.fit, batches)):
            self._prepare(batch)
            if self.bank is not None and index:
                self.bank.collect()
            losses.append(self._run(batch))
            if self._full is not None and len(batches) > 1:
                self._full.add()
        return torch.stack(losses).sum()

    def _make_room(self, batches: Sequence[MicroBatch]) -> None:
        """Have room for the packs of a step; let go of the kinds whose packs do not fit any more."""
        outgrown = self._room.grow(batches)
        if not outgrown:
            return
        self._captured = {shape: run for shape, run in self._captured.items() if shape[0] not in outgrown}
        self._renew_pool()
        if self.topology.rank == 0:
            told = "; ".join(outgrown.values())
            print(f"the fast path captures anew for policy.sequence_packing: {told}")

    def _renew_pool(self) -> None:
        if self._gpu and not self._captured:
            # cuBLAS keeps its workspace in the old pool, and torch refuses a pool that has lost all its
            # graphs but not all its memory (https://github.com/vllm-project/vllm/issues/28426).
            self._pool = torch.cuda.graph_pool_handle()

    def _prepare(self, batch: MicroBatch) -> None:
        shape = _shape(batch)
        if self._gpu and shape not in self._captured and shape not in self._uncaptured:
            try:
                self._capture(batch)
            except NotCaptured as error:
                self._leave(batch, error)
        if self._full is not None and shape not in self._captured:
            self._clear()

    def _leave(self, batch: MicroBatch, error: NotCaptured) -> None:
        """Run micro batches of this shape as they are from here on, and say why."""
        self._uncaptured.add(_shape(batch))
        self._renew_pool()
        size = " × ".join(map(str, batch.input_ids.shape))
        self.slow_path_reason = f"micro batches of {size} slots cannot be captured: {error}"
        if self.topology.rank == 0:
            print(f"warning: the fast path is left: {self.slow_path_reason}", file=sys.stderr)

    def _run(self, batch: MicroBatch) -> torch.Tensor:
        captured = self._captured.get(_shape(batch))
        return self._compute(_span(batch), *batch.tensors) if captured is None else captured(batch)

    def _capture(self, batch: MicroBatch) -> None:
        """Capture a new shape, with the gradients so far put aside."""
        kept = self.bank.gradient.clone() if self.bank is not None else None
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        compute, clear = partial(self._compute, _span(batch)), self._clear
        if self._full is not None and self._captured:
            # Into the gradients of the first shape: others of its own would stay in memory for each shape.
            clear = partial(self.model.zero_grad, set_to_none=False)
            compute = partial(_after, clear, compute)
        # All layers are one function to the compiler, which by itself stops at 8 kinds and shapes of them.
        try:
            with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
                self._captured[_shape(batch)] = CapturedPass(compute, batch, clear, trained, self._pool)
        finally:
            if self.bank is not None and kept is not None:
                self.bank.gradient.copy_(kept)

    def _clear(self) -> None:
        if self.bank is not None:
            self.bank.gradient.zero_()
        else:
            self.model.zero_grad(set_to_none=True)

    def _compute(
        self,
        span: int | None,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        boundaries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Forward and backward of a micro batch's `tensors`; no packed row is longer than `span`."""
        blocks = None
        if positions is not None and boundaries is not None and span is not None:
            blocks = Blocks.of(positions, boundaries, span, self._dtype)
        with sdpa_kernel(_ATTENTION, set_priority=True):
            loss = self._loss(input_ids, labels, blocks)
            if self.bank is None:
                torch.autograd.backward(loss)
            else:
                self._add(torch.autograd.grad(loss, self._leaves, allow_unused=True))
        if self._full is not None:
            self._full.reduced()
        return loss.detach()

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add to the bank's gradients, all in one go: by itself autograd launches an addition for each."""
        pairs = [
            (leaf.grad, each)
            for leaf, each in zip(self._leaves, gradients, strict=True)
            if leaf.grad is not None and each is not None
        ]
        torch._foreach_add_([ours for ours, _ in pairs], [each for _, each in pairs])


def _leaves(bank: AdapterBank, framed: Sequence[FramedLinear]) -> list[nn.Parameter]:
    """What gradients are taken by: the factors of stacked linears, joined or not, and all others."""
    joined = [cast(nn.Parameter, factor) for linear in framed for factor in linear.factors]
    inside = {id(each) for linear in framed for each in linear.adapters.parameters()}
    return joined + [each for each in bank.parameters() if id(each) not in inside]


def _after(first: Callable[[], None], compute: Compute, *tensors: torch.Tensor) -> torch.Tensor:
    first()
    return compute(*tensors)


def _compiled(of_chunk: ChunkLoss, dtype: torch.dtype) -> ChunkLoss:
    """A kernel for whole logits in at most float32, otherwise what the compiler makes."""
    if of_chunk is chunk_loss and dtype == torch.float32:
        from lora_suite.train.fast import loss_kernel

        return loss_kernel.chunk_loss
    return torch.compile(of_chunk, dynamic=False)


def _frame_copies(bank: AdapterBank, framed: Sequence[FramedLinear]) -> Callable[[], None]:
    from lora_suite.train.fast.update_kernels import FrameCopies

    factors, targets, scaled = [], [], []
    for linear in framed:
        for adapter, a, b in zip(linear.by_position.values(), *linear.frame_parts(), strict=True):
            factors += [adapter.a, *adapter.b.view(len(b), -1, b.shape[2]).unbind()]
            targets += [a, *b.unbind()]
            scaled += [False, *len(b) * [True]]
    return FrameCopies(bank.compute, factors, targets, scaled, framed[0].scale)
