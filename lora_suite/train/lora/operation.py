# SPDX-License-Identifier: Apache-2.0
"""Adapted linears as one autograd operation: those that share an input (q, k, v; gate, up), or one alone.

With frozen W_i [out_i, in], B_i [out_i, rank_i], and A [Σ rank_i, in], the A_i of the linears one below the
other:

    t = x·Aᵀ                    one multiplication for all of them
    y_i = x·W_iᵀ + bias_i + s · t_i·B_iᵀ

    u_i = dy_i·B_i              dB_i = s · dy_iᵀ·t_i
    dx = Σ dy_i·W_i + s · u·A   dA = s · uᵀ·x

Every product with an adapter is an ``addmm`` into what is there already, and the scale is its factor: no
tensor of the size of an activation is made, scaled or added besides. What is kept for the backward pass is x,
which autograd keeps for A anyway, and t [tokens, Σ rank_i]. dx is not computed where x needs no gradient (the
first adapted layer), nor is anything for a factor that is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional

Maybe = torch.Tensor | None


@dataclass(frozen=True)
class Part:
    """One linear of a group: frozen weight [out, in] and bias [out], and its factor B [out, rank].

    keep_input [..., in], keep_output [..., out]: which elements dropout leaves of what A reads and of what
    the adapter adds (bool); None where nothing is dropped. The factor 1 / (1 - p) belongs into the scale.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    b: torch.Tensor
    keep_input: torch.Tensor | None = None
    keep_output: torch.Tensor | None = None


def adapted_linears(
    x: torch.Tensor, a: torch.Tensor, parts: Sequence[Part], scale: float, accumulate: bool = False
) -> tuple[torch.Tensor, ...]:
    """The outputs [..., out] of linears that read x [..., in], each with its adapter.

    a: the parts' factors A, stacked in their order [Σ rank, in], of x's dtype like everything else. scale:
    what the adapters' products are multiplied with. accumulate: add the factors' gradients into their
    ``.grad``, which must exist, in the multiplication itself, instead of handing them to autograd; hooks on
    the factors see nothing then. Raises ValueError for a weight or bias that trains: its gradient is never
    computed here.
    """
    if any(
        part.weight.requires_grad or (part.bias is not None and part.bias.requires_grad) for part in parts
    ):
        raise ValueError("an adapted linear's weight and bias are frozen; freeze them first")
    bs = [part.b for part in parts]
    gradients: list[Maybe] = [factor.grad if accumulate else None for factor in (a, *bs)]
    if accumulate and any(gradient is None for gradient in gradients):
        raise ValueError("accumulate needs factors that have a .grad")
    flat = x.reshape(-1, x.shape[-1])
    apply = cast(Callable[..., tuple[torch.Tensor, ...]], _AdaptedLinears.apply)
    outputs = apply(
        scale,
        len(parts),
        flat,
        a,
        *bs,
        *(part.weight for part in parts),
        *(part.bias for part in parts),
        *(_flat(part.keep_input) for part in parts),
        *(_flat(part.keep_output) for part in parts),
        *gradients,
    )
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)


def _flat(mask: Maybe) -> Maybe:
    return None if mask is None else mask.reshape(-1, mask.shape[-1])


class _AdaptedLinears(torch.autograd.Function):
    """`adapted_linears` on x [tokens, in].

    Arguments after the scale and the number n of linears: x, A, then n each of B, weight, bias, masks of
    inputs, masks of outputs, then A's and the B's gradients to add into.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, n: int, x: torch.Tensor, a: torch.Tensor, *rest: Maybe) -> Any:
        bs = cast(tuple[torch.Tensor, ...], rest[:n])
        weights = cast(tuple[torch.Tensor, ...], rest[n : 2 * n])
        biases, keep_inputs, keep_outputs = (rest[i * n : (i + 1) * n] for i in (2, 3, 4))
        ranks = [b.shape[1] for b in bs]
        if any(keep is not None for keep in keep_inputs):
            # Each linear drops its own part of x, so there is no common product.
            ts = [
                functional.linear(_kept(x, keep), rows)
                for keep, rows in zip(keep_inputs, torch.split(a, ranks), strict=True)
            ]
        else:
            ts = list(torch.split(functional.linear(x, a), ranks, 1))
        outputs = []
        for t, b, weight, bias, keep in zip(ts, bs, weights, biases, keep_outputs, strict=True):
            y = functional.linear(x, weight, bias)
            if keep is None:
                y.addmm_(t, b.t(), alpha=scale)
            else:
                # Only `addmm_` may write into a product: recomputation may have kept it (`recompute`).
                y = torch.add(y, functional.linear(t, b) * keep, alpha=scale)
            outputs.append(y)
        needs_x, needs_a, *needs_bs = ctx.needs_input_grad[2 : 4 + n]
        ctx.save_for_backward(
            x if needs_a else None,
            a,
            *bs,
            *(weights if needs_x else n * (None,)),
            *keep_inputs,
            *keep_outputs,
            *(t if needs else None for t, needs in zip(ts, needs_bs, strict=True)),
        )
        ctx.scale, ctx.n = scale, n
        ctx.accumulators = rest[5 * n :]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        n, scale = ctx.n, ctx.scale
        x, a, *saved = ctx.saved_tensors
        bs, weights, keep_inputs, keep_outputs, ts = (saved[i * n : (i + 1) * n] for i in range(5))
        needs_x, needs_a, *needs_bs = ctx.needs_input_grad[2 : 4 + n]
        into_a, *into_bs = ctx.accumulators
        updates = [_kept(dy, keep) for dy, keep in zip(dys, keep_outputs, strict=True)]

        dbs = [
            _product(dy.t(), t, b, into, scale) if needs else None
            for dy, t, b, into, needs in zip(updates, ts, bs, into_bs, needs_bs, strict=True)
        ]
        dx = da = None
        if needs_x or needs_a:
            us = [dy.mm(b) for dy, b in zip(updates, bs, strict=True)]
            ranks = [b.shape[1] for b in bs]
            if any(keep is not None for keep in keep_inputs):
                dx = _base_gradient(dys, weights) if needs_x else None
                das: list[Maybe] = []
                rows_of = zip(us, keep_inputs, torch.split(a, ranks), _split(into_a, ranks), strict=True)
                for u, keep, rows, into in rows_of:
                    if dx is not None:
                        dx.add_(_kept(u.mm(rows), keep), alpha=scale)
                    if needs_a:
                        das.append(_product(u.t(), _kept(x, keep), rows, into, scale))
                da = torch.cat(cast(list[torch.Tensor], das)) if needs_a and into_a is None else None
            else:
                u = us[0] if n == 1 else torch.cat(us, 1)
                if needs_x:
                    dx = _base_gradient(dys, weights).addmm_(u, a, alpha=scale)
                da = _product(u.t(), x, a, into_a, scale) if needs_a else None
        return None, None, dx, da, *dbs, *(5 * n + 1) * (None,)


def _kept(value: torch.Tensor, keep: Maybe) -> torch.Tensor:
    return value if keep is None else value * keep


def _split(into: Maybe, sizes: Sequence[int]) -> Sequence[Maybe]:
    return [None] * len(sizes) if into is None else torch.split(into, list(sizes))


def _base_gradient(dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ dy_i·W_i."""
    dx = dys[0].mm(weights[0])
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(dy, weight)
    return dx


def _product(left: torch.Tensor, right: torch.Tensor, like: torch.Tensor, into: Maybe, scale: float) -> Maybe:
    """scale · left·right, of the shape of `like`; added to `into` (then there is nothing to return)."""
    if into is None:
        # Times 0: the first argument gives the shape alone.
        return torch.addmm(like, left, right, beta=0.0, alpha=scale)
    into.addmm_(left, right, alpha=scale)
    return None
