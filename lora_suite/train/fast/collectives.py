# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensor and expert parallelism, for code that is compiled whole and captured in CUDA graphs.

A block of linears that is split over ranks (by output, then by input) needs one sum each way: of its output,
which every rank has a part of, and of the gradient by its input, which every rank reads whole. So `enter` and
`leave` stand around it: each is the other's backward pass (Megatron-LM's f and g, arXiv 1909.08053).

torch's functional operations are called as they are registered: their Python wrappers return tensors of a
class of their own, which an operation with a backward pass of its own cannot hand on.

Routed experts that are split over ranks see the tokens of all of them: `gather` puts every rank's rows
together, each rank computes what its own experts make of them, and `scatter` gives each rank the sum of all
parts of its rows. Again each is the other's backward pass. Sizes do not depend on where tokens are routed, so
nothing waits for the host; an all-to-all of just the rows that a rank's experts ask for would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch

from lora_suite.train.topology import Axis


@dataclass(frozen=True)
class Ranks:
    """An axis as compiled code takes it: this rank's index, ranks, name of their group."""

    index: int
    size: int
    group: str

    @classmethod
    def over(cls, axis: Axis) -> Self:
        """Of a topology's axis."""
        return cls(axis.index, axis.size, "" if axis.group is None else axis.group.group_name)


class TensorParallel(Ranks):
    """The ranks that split a layer's linears."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """x, which all ranks hold alike, for linears split by output; its gradient is summed over ranks."""
        return x if self.size == 1 else _apply(_Enter, x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x, a linear's that is split by input; its gradient is that of each part."""
        return x if self.size == 1 else _apply(_Leave, x, self.group)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x, outside autograd."""
        return x if self.size == 1 else _summed(x, self.group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, outside autograd: [size, *x.shape]."""
        return _gathered(x, self.size, self.group).view(self.size, *x.shape)


class ExpertParallel(Ranks):
    """The ranks that split routed experts."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [rows, …], of one size, rank after rank: [ranks · rows, …].

        Its gradient is summed over ranks, of which each gets that of its rows.
        """
        return x if self.size == 1 else _apply(_Gather, x, self.size, self.group)

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of this rank's rows of y [ranks · rows, …]: [rows, …]."""
        return y if self.size == 1 else _apply(_Scatter, y, self.size, self.group)


ALONE = TensorParallel(0, 1, "")
"""No tensor parallelism."""


def _gathered(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    operation = torch.ops._c10d_functional.all_gather_into_tensor
    gathered = torch.ops._c10d_functional.wait_tensor(operation(x.contiguous(), size, group))
    return cast(torch.Tensor, gathered)


def _scattered(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    operation = torch.ops._c10d_functional.reduce_scatter_tensor
    part = torch.ops._c10d_functional.wait_tensor(operation(x.contiguous(), "sum", size, group))
    return cast(torch.Tensor, part)


def _summed(x: torch.Tensor, group: str) -> torch.Tensor:
    operation = torch.ops._c10d_functional.all_reduce
    return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(operation(x, "sum", group)))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _summed(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.ranks = size, group
        return _gathered(x, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _scattered(gradients[0], *ctx.ranks), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.ranks = size, group
        return _scattered(y, size, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _gathered(gradients[0], *ctx.ranks), None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return cast(Callable[..., torch.Tensor], function.apply)(*arguments)
