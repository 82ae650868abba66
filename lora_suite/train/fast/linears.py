# SPDX-License-Identifier: Apache-2.0
"""Linears that read the same input, stacked into one matrix product; trained whole, or frozen with adapters.

A frozen stack and its adapters share one matrix, W framed by the adapters' factors:

    M = [[W, s·B], [A, 0]]    [out + R, in + R],    R: ranks of all adapters of the stack

A is stacked, B is block diagonal. Then one product more than without adapters gives each direction:

    forward     t = x·Aᵀ,     y  = [x, t]·[W, s·B]ᵀ
    backward    u = dy·(s·B), dx = [dy, u]·[W; A],    dA = uᵀ·x,    dB = s·dyᵀ·t

and nothing as large as x or y is read or written once more to add an adapter's part. The frame is a copy of
the adapters' parameters, made whenever these change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lora_suite.train.lora.adapter import Adapter

_ALIGNMENT = 16
"""Columns of the frame are padded to what a matrix unit multiplies at once."""
THIN = 32
"""Columns of a frame up to which `ThinOps` were seen to pay; with many more no product is bound by memory."""


@dataclass(frozen=True)
class ThinOps:
    """Operations for frames of few columns, which read each activation once: those of `thin_kernels`.

    pull: `thin_pull`. push: `thin_push`. mlp_backward: `thin_mlp_backward`.
    """

    pull: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    push: Callable[..., torch.Tensor]
    mlp_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def thin_ops() -> ThinOps:
    """The kernels; where Triton and a GPU are."""
    from lora_suite.train.fast import thin_kernels as kernels

    return ThinOps(kernels.thin_pull, kernels.thin_push, kernels.thin_mlp_backward)


@dataclass(frozen=True)
class Thin:
    """A framed linear's thin operations, and where they put its factors' gradients in one flat vector.

    rows [entries, 4] and bases [adapters]: see `thin_kernels`. size: of the vector.
    """

    ops: ThinOps
    rows: torch.Tensor
    bases: torch.Tensor
    size: int


Beside = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From x [tokens, inputs] and A [R, inputs] to [x, x·Aᵀ]."""


def beside(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """`Beside` in plain torch."""
    return torch.cat([x, x @ a.t()], 1)


def beside_op() -> Beside:
    """By a kernel, whose result a compiler keeps for the backward pass; where Triton and a GPU are."""
    from lora_suite.train.fast import beside_kernels as kernels

    return kernels.beside


class StackedLinear(nn.Module):
    """Linears [out_i, in] with one input, as one trained weight [sum of out_i, in]."""

    def __init__(
        self, in_features: int, widths: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.widths = tuple(widths)
        out = sum(self.widths)
        self.weight = nn.Parameter(torch.empty(out, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out, dtype=dtype, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] to y [tokens, sum of out_i]."""
        return nn.functional.linear(x, self.weight, self.bias)

    def parts(self, name: str) -> tuple[torch.Tensor, ...]:
        """Views of each linear's part of `weight` or `bias`, in order."""
        return torch.split(getattr(self, name).detach(), list(self.widths))


class FramedLinear(nn.Module):
    """Frozen linears [out_i, in] with one input, and adapters beside some of them, as one matrix.

    adapters: by the linear's position, at least one, all of one kind and without dropout. groups: how often
    the linears alternate in the output, each with an equal part of its rows in turn.
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        bias: bool,
        adapters: dict[int, Adapter],
        dtype: torch.dtype,
        device: torch.device,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.widths = tuple(widths)
        self.groups = groups
        self.out = sum(self.widths)
        self.by_position = dict(sorted(adapters.items()))
        self.adapters = nn.ModuleList(self.by_position.values())
        spec = next(iter(adapters.values())).spec
        self.scale: float = spec.scale
        self.rank: int = spec.rank
        frame = spec.rank * len(adapters)
        frame += -frame % _ALIGNMENT
        self.register_buffer(
            "matrix", torch.zeros(self.out + frame, in_features + frame, dtype=dtype, device=device)
        )
        self.register_buffer("bias", torch.empty(self.out, dtype=dtype, device=device) if bias else None)
        self.matrix: torch.Tensor
        self.bias: torch.Tensor | None
        self._leaf: tuple[nn.Parameter, ...] = ()
        self.thin: Thin | None = None
        self.beside: Beside = beside

    def join(self, leaf: nn.Parameter | None) -> None:
        """Hand gradients to the adapters' factors as one flat parameter: A and B of each adapter in turn."""
        # In a tuple: the factors are the adapters' parameters, not this module's as well.
        self._leaf = () if leaf is None else (leaf,)

    def use(self, ops: ThinOps) -> None:
        """Take these operations where the frame is thin enough for them; they sum in float32."""
        layout = self.layout
        if len(self.matrix) - self.out > THIN or self.matrix.dtype == torch.float64:
            return
        sizes = [size for part in layout.sizes for size in part]
        *begins, size = accumulate(sizes, initial=0)
        rows = [
            (
                group * layout.out // layout.groups + start,
                group * layout.out // layout.groups + stop,
                index * layout.rank,
                begins[2 * index + 1] + group * (stop - start) * layout.rank,
            )
            for index, (start, stop) in enumerate(layout.rows)
            for group in range(layout.groups)
        ]
        table = torch.tensor(rows, dtype=torch.int32, device=self.matrix.device)
        bases = torch.tensor(begins[::2], dtype=torch.int32, device=self.matrix.device)
        self.thin = Thin(ops, table, bases, size)

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight [sum of out_i, in], a view."""
        return self.matrix[: self.out, : self.in_features]

    def parts(self, name: str) -> tuple[torch.Tensor, ...]:
        """Views of each linear's part of `weight` or `bias`, in order."""
        return torch.split(getattr(self, name), list(self.widths))

    def frame_parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where each adapter's A [rank, in] and s·B [groups, out_i / groups, rank] stand in the matrix.

        Views, in the order of `adapters`.
        """
        a, b = [], []
        for index, (start, stop) in enumerate(self.layout.rows):
            rank = slice(index * self.rank, (index + 1) * self.rank)
            a.append(self.matrix[self.out :][rank, : self.in_features])
            rows = self.matrix[: self.out, self.in_features :]
            rows = rows.view(self.groups, -1, rows.shape[1])
            b.append(rows[:, start:stop, rank])
        return a, b

    @property
    def enabled(self) -> bool:
        """Whether the adapters are switched on."""
        return all(adapter.enabled for adapter in self.by_position.values())

    @property
    def factors(self) -> list[torch.Tensor]:
        """What the operation's gradients are of: A and B of each adapter in turn, or all of them as one."""
        return list(self._leaf) or [
            factor for adapter in self.by_position.values() for factor in (adapter.a, adapter.b)
        ]

    @property
    def layout(self) -> Layout:
        """Where everything stands in the matrix."""
        starts = [sum(self.widths[:position]) // self.groups for position in self.by_position]
        stops = [sum(self.widths[: position + 1]) // self.groups for position in self.by_position]
        rows = tuple(zip(starts, stops, strict=True))
        return Layout(self.in_features, self.out, self.rank, self.scale, rows, self.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] to y [tokens, sum of out_i]; without the adapters where they are switched off."""
        if self.enabled:
            apply = cast(Callable[..., torch.Tensor], _Framed.apply)
            y = apply(x, self.matrix, self.layout, self.thin, self.beside, *self.factors)
        else:
            y = x @ self.weight.t()
        return y if self.bias is None else y + self.bias


class Layout(NamedTuple):
    """Of a framed matrix: input and output features, rank and scale of an adapter, rows of y of each.

    rows: within one of the `groups` equal parts of y's features; in each of them an adapter has the same.
    """

    inputs: int
    out: int
    rank: int
    scale: float
    rows: tuple[tuple[int, int], ...]
    groups: int

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Elements of A and of B of each adapter."""
        rank = self.rank
        return [(rank * self.inputs, self.groups * (stop - start) * rank) for start, stop in self.rows]


class _Framed(torch.autograd.Function):
    """y = [x, t]·[W, s·B]ᵀ; the factors are arguments so that autograd hands them their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        matrix: torch.Tensor,
        layout: Layout,
        thin: Thin | None,
        beside: Beside,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        wide = beside(x, matrix[layout.out :, : layout.inputs])
        # Whoever made x may keep it, too: attention does.
        ctx.save_for_backward(x, room_alone(wide, layout), matrix)
        ctx.layout, ctx.thin, ctx.count = layout, thin, len(factors)
        return wide @ matrix[: layout.out].t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, t, matrix = ctx.saved_tensors
        layout, thin = ctx.layout, ctx.thin
        ours = pulled(gradients[0], t, matrix, layout, thin)
        dx = ours.beside @ matrix[:, : layout.inputs] if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, *pushed(ours, x, layout, thin, ctx.count)


def room_alone(wide: torch.Tensor, layout: Layout) -> torch.Tensor:
    """t [tokens, R] of [x, t], so that nothing holds the rest of it."""
    return wide[:, layout.inputs :].clone(memory_format=torch.contiguous_format)


def parted(wide: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """x and t of [x, t]."""
    return wide[:, : layout.inputs], wide[:, layout.inputs :]


class Pulled(NamedTuple):
    """What dy alone gives of a framed linear's gradients, before x has to be there.

    beside: [dy, u], of which dx = [dy, u]·[W; A]. of_b: dB of each adapter, or what `ThinOps.pull` made.
    """

    beside: torch.Tensor
    of_b: tuple[torch.Tensor, ...]


def pulled(
    dy: torch.Tensor, t: torch.Tensor, matrix: torch.Tensor, layout: Layout, thin: Thin | None
) -> Pulled:
    """The first half of the gradients of y = [x, t]·[W, s·B]ᵀ."""
    if thin is not None:
        made, vectors = thin.ops.pull(dy, t, matrix, thin.rows, layout.rank, layout.scale, thin.size)
        return Pulled(made, (vectors,))
    u = dy @ matrix[: layout.out, layout.inputs :]
    return Pulled(torch.cat([dy, u], 1), gradients_of_b(dy, t, layout))


def gradients_of_b(dy: torch.Tensor, t: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """dB = s·dyᵀ·t of each adapter."""
    t = t * layout.scale
    # An adapter whose rows are not adjacent takes them out of the product of all rows and all ranks.
    whole = (dy.t() @ t).view(layout.groups, -1, t.shape[1]) if layout.groups > 1 else None
    gradients = []
    for index, (start, stop) in enumerate(layout.rows):
        part = slice(index * layout.rank, (index + 1) * layout.rank)
        if whole is None:
            gradients.append(dy[:, start:stop].t() @ t[:, part])
        else:
            gradients.append(whole[:, start:stop, part].flatten(0, 1))
    return tuple(gradients)


def pushed(
    ours: Pulled, x: torch.Tensor, layout: Layout, thin: Thin | None, count: int
) -> list[torch.Tensor]:
    """The second half, dA = uᵀ·x: the factors' gradients as `count` tensors."""
    u = ours.beside[:, layout.out :]
    if thin is not None:
        return from_flat(thin.ops.push(x, u, *ours.of_b, thin.bases, layout.rank), layout, count)
    da = torch.split(u.t() @ x, layout.rank)
    pairs = zip(da, ours.of_b, strict=False)  # columns that pad the frame have no adapter
    return handed([gradient for pair in pairs for gradient in pair], count)


def handed(gradients: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Gradients of A and B of each adapter in turn, as autograd wants them: one each, or one of all."""
    if count == len(gradients):
        return gradients
    return [torch.cat([gradient.flatten() for gradient in gradients])]


def from_flat(flat: torch.Tensor, layout: Layout, count: int) -> list[torch.Tensor]:
    """The same from a flat vector of them all."""
    if count == 1:
        return [flat]
    parts = torch.split(flat, [size for pair in layout.sizes for size in pair])
    shapes = [shape for _ in layout.rows for shape in ((layout.rank, layout.inputs), (-1, layout.rank))]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def refresh(linears: Sequence[FramedLinear]) -> None:
    """Copy the adapters' factors into the frames: A as it is, B times its scale."""
    framed_a: list[torch.Tensor] = []
    framed_b: list[torch.Tensor] = []
    a: list[torch.Tensor] = []
    b: list[torch.Tensor] = []
    for linear in linears:
        ours = linear.frame_parts()
        framed_a += ours[0]
        framed_b += ours[1]
        a += [adapter.a for adapter in linear.by_position.values()]
        b += [adapter.b.view(linear.groups, -1, linear.rank) for adapter in linear.by_position.values()]
    torch._foreach_copy_(framed_a, a)
    torch._foreach_copy_(framed_b, torch._foreach_mul(b, linears[0].scale))
