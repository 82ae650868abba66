# SPDX-License-Identifier: Apache-2.0
"""Routed experts: rows sorted by expert on the device, grouped products, nothing waits.

Each token's row is copied once for each of its experts, sorted by expert; W₁ and W₂ are each expert's:

    x' = rows of x,   h = x'·W₁ᵀ,   a = w · relu(h)²,   y' = a·W₂ᵀ,   y = sum of each token's rows of y'

w is the router's weight of a row; it is applied before the second product, which is linear, so that its
gradient needs no y'. How many rows there are does not depend on the routing, only where each expert's end,
and that is read on the device. Sums are taken in a fixed order, so results do not vary from run to run.

A rank may have some of the experts only. Rows of the others come last, where no product reads or writes them.

Frozen experts with adapters are matrices [[W, s·B], [A, 0]], one an expert, as in `linears`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lora_suite.train.fast.expert_rows import combine, gather, relu2, relu2_backward
from lora_suite.train.lora.experts import ExpertAdapter
from lora_suite.train.lora.grouped import form_for, grouped_outer, grouped_rows

_ALIGNMENT = 8
"""Ranks are padded to 16 bytes of bfloat16, which grouped products ask of a row's stride."""


class Routing(NamedTuple):
    """Which rows go where.

    weights [tokens, k]: of each token's experts. order int64 [rows]: the place token · k + choice of each
    sorted row; places int64 [rows]: the sorted row of each place. ends int32 [experts (this rank's)]: where
    each expert's rows end; rows behind the last are of other ranks' experts.
    """

    weights: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


def route(chosen: torch.Tensor, weights: torch.Tensor, experts: int, own: range | None = None) -> Routing:
    """Sort by expert. chosen int64 [tokens, k]: the experts of each token; weights [tokens, k].

    experts: in all. own: those of this rank, which come first; None where it has all.
    """
    own = range(experts) if own is None else own
    # As narrow as can be: a radix sort takes a pass for every few bits.
    kind = torch.int16 if experts < 2**15 else torch.int32
    numbers = chosen.flatten()
    if own.start:
        numbers = (numbers - own.start).remainder(experts)
    owners, order = torch.sort(numbers.to(kind), stable=True)
    rows = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, rows)
    every = torch.arange(len(own), device=order.device, dtype=kind)
    ends = torch.searchsorted(owners, every, right=True, out_int32=True)
    return Routing(weights, order, places, ends)


class StackedExperts(nn.Module):
    """One linear of every expert: weight [experts, out, in], trained or frozen."""

    def __init__(
        self, experts: int, in_features: int, out: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out = out
        self.weight = nn.Parameter(torch.empty(experts, out, in_features, dtype=dtype, device=device))

    @property
    def operand(self) -> torch.Tensor:
        """What rows are multiplied with."""
        # An alias, because the compiler takes no operation that is given one tensor twice.
        return self.weight.detach()

    @property
    def trained(self) -> list[torch.Tensor]:
        """What the operation's gradients are of, one after the other."""
        return [self.weight]


class FramedExperts(nn.Module):
    """One frozen linear of every expert, framed by an adapter's factors: [experts, out + R, in + R]."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out: int,
        adapter: ExpertAdapter,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out = out
        self.adapter = adapter
        frame = adapter.spec.rank + -adapter.spec.rank % _ALIGNMENT
        size = (experts, out + frame, in_features + frame)
        self.register_buffer("matrix", torch.zeros(size, dtype=dtype, device=device))
        self.matrix: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weights [experts, out, in], a view."""
        return self.matrix[:, : self.out, : self.in_features]

    @property
    def operand(self) -> torch.Tensor:
        """What rows are multiplied with: without the frame where the adapter is switched off."""
        return self.matrix if self.adapter.enabled else self.weight

    @property
    def trained(self) -> list[torch.Tensor]:
        """What the operation's gradients are of, one after the other."""
        return [self.adapter.a, self.adapter.b] if self.adapter.enabled else []

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapter's factors into the frame: A as it is, B times its scale."""
        a, b, rank = self.adapter.a, self.adapter.b, self.adapter.spec.rank
        self.matrix[:, self.out : self.out + rank, : self.in_features] = a
        torch.mul(b, self.adapter.spec.scale, out=self.matrix[:, : self.out, self.in_features :][:, :, :rank])


Experts = StackedExperts | FramedExperts


def routed_mlp(x: torch.Tensor, routing: Routing, up: Experts, down: Experts) -> torch.Tensor:
    """y [tokens, hidden] of x [tokens, hidden] by the experts each token is routed to; see the module."""
    modes = Modes((up.in_features, down.in_features), _adapted(up), _adapted(down))
    apply = cast(Callable[..., torch.Tensor], _RoutedMlp.apply)
    return apply(x, *routing, up.operand, down.operand, modes, *up.trained, *down.trained)


class Modes(NamedTuple):
    """What is trained.

    features: of x and of the hidden states. up and down: rank and scale of the adapters; None where the
    weight itself is what may be trained.
    """

    features: tuple[int, int]
    up: tuple[int, float] | None
    down: tuple[int, float] | None


def _adapted(experts: Experts) -> tuple[int, float] | None:
    if isinstance(experts, StackedExperts):
        return None
    return experts.adapter.spec.rank, experts.adapter.spec.scale


class _RoutedMlp(torch.autograd.Function):
    """Both linears of every expert and the activation between them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        places: torch.Tensor,
        ends: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        modes: Modes,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        parts = routed(x, weights, order, places, ends, up, down, *modes.features)
        y: torch.Tensor = parts[0]
        _, h, t_up, t_down = parts
        ctx.save_for_backward(x, weights, order, places, ends, up, down, h, t_up, t_down)
        ctx.modes = modes
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        modes = ctx.modes
        whole = [
            adapted is None and ctx.needs_input_grad[position]
            for adapted, position in ((modes.up, 8), (modes.down, len(ctx.needs_input_grad) - 1))
        ]
        dx, d_weights, *rest = routed_backward(gradients[0], *ctx.saved_tensors, *modes.features, *whole)
        of_trained: list[torch.Tensor | None] = []
        for first, second, adapted in ((*rest[:2], modes.up), (*rest[2:], modes.down)):
            if adapted is None:
                of_trained.append(first if first.numel() else None)
            elif first.numel():
                rank, scale = adapted
                of_trained += [first[:, :rank], second[..., :rank] * scale]
        return dx, d_weights, None, None, None, None, None, None, *of_trained


@torch.library.custom_op("lora_suite::routed", mutates_args=())
def routed(
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    features: int,
    hidden: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y [tokens, features], and what `routed_backward` needs: h [rows, hidden], and x'·Aᵀ and a·Aᵀ.

    up [experts, hidden + R, features + R] and down [experts, features + S, hidden + S]: R and S may be 0.
    """
    wide = gather(x, order, ends, weights.shape[1], up.shape[2] - features)
    t_up = _fill(wide, features, up[:, hidden:, :features].mT, ends)
    h = _rows(wide, up[:, :hidden].mT, ends)
    wide = relu2(h, weights, order, ends, down.shape[2] - hidden)
    t_down = _fill(wide, hidden, down[:, features:, :hidden].mT, ends)
    rows = _rows(wide, down[:, :features].mT, ends)
    return combine(rows, places, ends, weights.shape[1], features), h, t_up, t_down


@routed.register_fake
def _(  # type: ignore[no-untyped-def]
    x, weights, order, places, ends, up, down, features, hidden
) -> tuple[torch.Tensor, ...]:
    rows = len(order)
    ranks = up.shape[2] - features, down.shape[2] - hidden
    return torch.empty_like(x), *(x.new_empty(rows, columns) for columns in (hidden, *ranks))


@torch.library.custom_op("lora_suite::routed_backward", mutates_args=())
def routed_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    h: torch.Tensor,
    t_up: torch.Tensor,
    t_down: torch.Tensor,
    features: int,
    hidden: int,
    of_up: bool,
    of_down: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by x and weights, and two each by up and down.

    Of a framed matrix: by A [experts, R, in] and by s·B [experts, out, R]. Of a weight: by it (where `of_up`
    or `of_down` asks for that) and nothing.
    """
    choices, ranks = weights.shape[1], (t_up.shape[1], t_down.shape[1])
    wide = gather(dy, order, ends, choices, ranks[1])
    u = _fill(wide, features, down[:, :features, hidden:], ends)
    d = _rows(wide, down[:, :, :hidden], ends)
    dy = wide[:, :features]
    by_down = _trained(
        dy, t_down, u, ranks[1] > 0 or of_down, ends, lambda: relu2(h, weights, order, ends, 0)
    )
    wide, d_weights = relu2_backward(h, d, weights, order, ends, ranks[0])
    u = _fill(wide, hidden, up[:, :hidden, features:], ends)
    dx = combine(_rows(wide, up[:, :, :features], ends), places, ends, choices, features)
    dh = wide[:, :hidden]
    by_up = _trained(dh, t_up, u, ranks[0] > 0 or of_up, ends, lambda: gather(x, order, ends, choices, 0))
    return dx, d_weights[places].view_as(weights), *by_up, *by_down


@routed_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dy, x, weights, order, places, ends, up, down, h, t_up, t_down, features, hidden, of_up, of_down
) -> tuple[torch.Tensor, ...]:
    experts, sizes = len(ends), list[tuple[int, ...]]()
    for rank, asked, inputs, out in (
        (t_up.shape[1], of_up, features, hidden),
        (t_down.shape[1], of_down, hidden, features),
    ):
        if rank:
            sizes += [(experts, rank, inputs), (experts, out, rank)]
        else:
            sizes += [(experts, out, inputs) if asked else (0,), (0,)]
    gradients = [x.new_empty(size) for size in sizes]
    return torch.empty_like(x), torch.empty_like(weights), *gradients


def _rows(x: torch.Tensor, stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped_rows(x, stack, ends, form_for(x.device, x.dtype))


def _outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return grouped_outer(left, right, ends, form_for(left.device, left.dtype))


def _fill(wide: torch.Tensor, columns: int, stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Put the product of the first `columns` of `wide` with a stack [experts, columns, R] behind them."""
    if stack.shape[2] == 0:
        return wide.new_empty(len(wide), 0)
    product = _rows(wide[:, :columns], stack, ends)
    wide[:, columns:] = product
    return product


def _trained(
    dy: torch.Tensor,
    t: torch.Tensor,
    u: torch.Tensor,
    asked: bool,
    ends: torch.Tensor,
    inputs: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of one linear: by A and by s·B where it has an adapter, else by the weight if asked for."""
    nothing = dy.new_empty(0)
    if not asked:
        return nothing, nothing.clone()
    if t.shape[1]:
        return _outer(u, inputs(), ends), _outer(dy, t, ends)
    return _outer(dy, inputs(), ends), nothing
