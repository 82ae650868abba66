# SPDX-License-Identifier: Apache-2.0
"""Products of a stack of experts with the rows routed to each, with an adapter beside every expert.

Rows lie expert after expert: expert e owns the rows from offsets[e - 1] up to offsets[e]. With the stacks
W [E, out, in], A [E, rank, in] and B [E, out, rank], for the rows x_e of each expert:

    t_e = x_e·A_eᵀ             y_e = x_e·W_eᵀ + s · t_e·B_eᵀ

    u_e = dy_e·B_e             dB_e = s · dy_eᵀ·t_e
    dx_e = dy_e·W_e + s · u_e·A_e     dA_e = s · u_eᵀ·x_e      dW_e = dy_eᵀ·x_e

Two forms compute the same. `grouped`: every product is one grouped multiplication of torch, which reads the
offsets where they lie, on the device: nothing waits for the host. `loop`: one multiplication an expert, in
any dtype and on any device; it reads the offsets on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
from torch.nn import functional

Form = Literal["grouped", "loop"]
Maybe = torch.Tensor | None

_ALIGNMENT = 16
"""Bytes to which torch's grouped multiplication wants every row aligned."""


def form_for(device: torch.device, dtype: torch.dtype) -> Form:
    """The form that is fast there: grouped where torch has a kernel for it, bfloat16 on a GPU."""
    return "grouped" if device.type == "cuda" and dtype == torch.bfloat16 else "loop"


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, form: Form) -> torch.Tensor:
    """x [rows, in] times the transposed weight [E, out, in] of each row's expert: [rows, out].

    offsets: int32 [E] on x's device, where each expert's rows end; the last is the number of rows.
    """
    return _apply(0.0, form, offsets, x, weight, None, None, None, None)


def grouped_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    scale: float,
    form: Form,
    accumulate: bool = False,
) -> torch.Tensor:
    """As `grouped_linear`, with the adapters a [E, rank, in] and b [E, out, rank], all of x's dtype.

    accumulate: add the factors' gradients into their ``.grad``, which must exist, instead of handing them to
    autograd; hooks on the factors see nothing then.
    """
    if accumulate and (a.grad is None or b.grad is None):
        raise ValueError("accumulate needs factors that have a .grad")
    into_a, into_b = (a.grad, b.grad) if accumulate else (None, None)
    return _apply(scale, form, offsets, x, weight, a, b, into_a, into_b)


def _apply(scale: float, form: Form, offsets: torch.Tensor, x: torch.Tensor, *rest: Maybe) -> torch.Tensor:
    # A rank to which nothing was routed still takes part in what its ranks do together.
    form = form if x.shape[0] else "loop"
    apply = cast(Callable[..., torch.Tensor], _GroupedLora.apply)
    return apply(scale, form, offsets, x, *rest)


class _GroupedLora(torch.autograd.Function):
    """`grouped_lora`; without factors `grouped_linear`. The last two arguments are gradients to add into."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        form: Form,
        offsets: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        a: Maybe,
        b: Maybe,
        into_a: Maybe,
        into_b: Maybe,
    ) -> torch.Tensor:
        y = grouped_rows(x, weight.mT, offsets, form)
        t = None
        if a is not None and b is not None:
            ctx.rank = a.shape[1]
            a, b = _padded(a, b, form)
            t = grouped_rows(x, a.mT, offsets, form)
            y.add_(grouped_rows(t, b.mT, offsets, form), alpha=scale)
        needs_x, needs_weight, needs_a, needs_b = ctx.needs_input_grad[3:7]
        ctx.save_for_backward(
            offsets,
            x if needs_weight or needs_a else None,
            weight if needs_x else None,
            a,
            b,
            t if needs_b else None,
        )
        ctx.scale, ctx.form = scale, form
        ctx.into = into_a, into_b
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        offsets, x, weight, a, b, t = ctx.saved_tensors
        form, scale = ctx.form, ctx.scale
        needs_x, needs_weight, needs_a, needs_b = ctx.needs_input_grad[3:7]
        dy = dy.contiguous()
        dx = grouped_rows(dy, weight, offsets, form) if needs_x else None
        dweight = grouped_outer(dy, x, offsets, form) if needs_weight else None
        da = db = None
        if b is not None:
            into_a, into_b = ctx.into
            u = grouped_rows(dy, b, offsets, form)
            if dx is not None:
                dx.add_(grouped_rows(u, a, offsets, form), alpha=scale)
            if needs_a:
                da = _added(into_a, grouped_outer(u, x, offsets, form)[:, : ctx.rank], scale)
            if needs_b:
                db = _added(into_b, grouped_outer(dy, t, offsets, form)[..., : ctx.rank], scale)
        return None, None, None, dx, dweight, da, db, None, None


def _padded(a: torch.Tensor, b: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors with a rank that grouped multiplication takes; what is added is zero and adds nothing."""
    missing = -a.shape[1] % (_ALIGNMENT // a.element_size())
    if form == "loop" or not missing:
        return a, b
    return functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))


def _added(into: Maybe, gradient: torch.Tensor, scale: float) -> Maybe:
    """scale · gradient, added to `into` (then there is nothing to return)."""
    if into is None:
        return gradient * scale
    into.add_(gradient, alpha=scale)
    return None


def grouped_rows(x: torch.Tensor, stack: torch.Tensor, offsets: torch.Tensor, form: Form) -> torch.Tensor:
    """x_e · stack[e] for the rows of each expert: x [rows, k], stack [E, k, n] to [rows, n]."""
    if form == "grouped":
        return functional.grouped_mm(x, stack, offs=offsets)
    y = x.new_zeros(x.shape[0], stack.shape[2])
    for expert, start, stop in _spans(offsets):
        torch.mm(x[start:stop], stack[expert], out=y[start:stop])
    return y


def grouped_outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, form: Form) -> torch.Tensor:
    """left_eᵀ · right_e for the rows of each expert: [rows, m] and [rows, n] to [E, m, n]."""
    if form == "grouped":
        return functional.grouped_mm(left.t(), right, offs=offsets)
    products = left.new_zeros(len(offsets), left.shape[1], right.shape[1])
    for expert, start, stop in _spans(offsets):
        torch.mm(left[start:stop].t(), right[start:stop], out=products[expert])
    return products


def _spans(offsets: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, row after its last) of every expert that has rows."""
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            yield expert, start, stop
        start = stop
