# SPDX-License-Identifier: Apache-2.0
"""Rows on their way to routed experts and back, on one rank or over the ranks of expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from lora_suite.train.topology import Axis

_Apply = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """How many rows go to each rank and come from each, and how received rows lie expert after expert.

    order: where in the received rows (by sender, then expert) the rows by expert (then sender) are found;
    inverse: the way back.
    """

    ep: Axis
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    inverse: torch.Tensor


@dataclass(frozen=True)
class Route:
    """The way of every (token, choice) to its expert.

    order [tokens · choices]: where among them, in the tokens' order, the rows by expert are found; inverse:
    the way back. offsets int32 [experts of this rank]: where each expert's rows end, after the exchange.
    choices: experts that a token meets. exchange: None where every rank has all experts.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    choices: int
    exchange: Exchange | None

    @classmethod
    @torch.no_grad()
    def of(cls, chosen: torch.Tensor, experts: int, ep: Axis) -> Route:
        """The route for chosen experts, int64 [tokens, choices] of 0 … experts - 1.

        Without expert parallelism nothing waits for the host; with it, once, for the sizes of the exchange.
        """
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        every = torch.arange(experts, device=flat.device)
        offsets = torch.searchsorted(flat[order], every, right=True)
        exchange = None
        if ep.size > 1:
            counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).view(ep.size, -1)
            exchange, offsets = _exchange(counts, ep)
        return cls(order, torch.argsort(order), offsets.to(torch.int32), chosen.shape[1], exchange)

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [tokens, channels] as this rank's experts' rows, expert after expert."""
        rows = cast(_Apply, _Spread.apply)(tokens, self.order, self.inverse, self.choices)
        if self.exchange is None:
            return rows
        each = self.exchange
        rows = cast(_Apply, _AllToAll.apply)(rows, each.sent, each.received, each.ep)
        return _permuted(rows, each.order, each.inverse)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """The experts' rows back at their tokens: [tokens, choices, channels]."""
        if self.exchange is not None:
            each = self.exchange
            rows = _permuted(rows, each.inverse, each.order)
            rows = cast(_Apply, _AllToAll.apply)(rows, each.received, each.sent, each.ep)
        return _permuted(rows, self.inverse, self.order).view(-1, self.choices, rows.shape[1])


def _exchange(counts: torch.Tensor, ep: Axis) -> tuple[Exchange, torch.Tensor]:
    """The exchange for counts [ranks, experts of one] of this rank's rows; where its experts' rows end."""
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=ep.group)
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    owners = torch.arange(counts.shape[1], device=counts.device).repeat(ep.size)
    owners = owners.repeat_interleave(theirs.flatten(), output_size=sum(received))
    order = torch.argsort(owners, stable=True)
    return Exchange(ep, sent, received, order, torch.argsort(order)), theirs.sum(0).cumsum(0)


def _permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return cast(_Apply, _Spread.apply)(rows, order, inverse, 1)


class _Spread(torch.autograd.Function):
    """Each row `copies` times, in a new order. The gradient of a row is the sum of its copies', always in the
    same order: no atomic additions, so that a repeated step is bit-equal."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        back = gradient.index_select(0, inverse)
        return back if ctx.copies == 1 else back.view(-1, ctx.copies, back.shape[1]).sum(1), None, None, None


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of an axis: the first `sent[0]` to the first, and so on; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], ep: Axis) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.ep = sent, received, ep
        return _all_to_all(rows, sent, received, ep)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.ep), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], ep: Axis) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=ep.group)
    return arrived
