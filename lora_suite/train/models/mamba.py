# SPDX-License-Identifier: Apache-2.0
"""The core of a Mamba-2 mixer: what happens between its two linears (Dao and Gu, arXiv 2405.21060).

    gate, x·B·C, dt = the projection's parts
    x, B, C         = silu(causal convolution of x·B·C)
    h_t             = exp(dt_t·A)·h_(t-1) + dt_t·B_t·x_tᵀ,     y_t = C_t·h_t + D·x_t      (of each head)
    output          = norm of each group's channels of y · silu(gate)

The recurrence is computed in chunks by matrix products. What is here is plain torch, in any dtype, and the
reference of the GPU's kernels (`lora_suite.train.fast.scan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from lora_suite.blueprint.shape import HybridShape

Recurrence = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""y of q, k, v, the logarithm of the decay and where segments start; see `recurrence`."""


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of a mixer: counts of heads, channels and positions, and the limits of dt, in its own unit.

    groups: of heads that share B and C. state: channels of B and C. kernel: positions of the convolution.
    chunk: positions that the plain recurrence takes at a time. eps: of the norm.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    chunk: int
    eps: float
    dt_limits: tuple[float, float]

    @classmethod
    def of(cls, shape: HybridShape, chunk: int, eps: float, dt_limits: tuple[float, float]) -> MambaSizes:
        """Of a model's shape and what its configuration says besides."""
        return cls(
            heads=shape.mamba_heads,
            head_dim=shape.mamba_head_dim,
            groups=shape.mamba_groups,
            state=shape.state_size,
            kernel=shape.conv_kernel,
            chunk=chunk,
            eps=eps,
            dt_limits=dt_limits,
        )

    @property
    def inner(self) -> int:
        """Channels of x, of the gate and of the output."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that pass the convolution: x, and B and C of each group."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Channels of the first linear's output: the gate, what passes the convolution, dt of each head."""
        return self.inner + self.conv_channels + self.heads


class MambaWeights(NamedTuple):
    """What a mixer has besides its two linears.

    conv [conv channels, 1, kernel] and conv_bias [conv channels] or None; dt_bias, a_log and d [heads]; norm
    [inner channels].
    """

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    a_log: torch.Tensor
    d: torch.Tensor
    norm: torch.Tensor


def mix(
    projected: torch.Tensor,
    weights: MambaWeights,
    sizes: MambaSizes,
    positions: torch.Tensor | None = None,
    through: Recurrence | None = None,
) -> torch.Tensor:
    """From the first linear's output to the second's input.

    projected [rows, length, projected channels]; returns [rows, length, inner channels] in its dtype.
    positions [rows, length]: of each slot in its segment, for packed rows, which then do not see each other.
    through: computes the recurrence; `recurrence` where it is None. dt and the decay are computed in float32
    at least, whatever the model's dtype.
    """
    rows, length = projected.shape[:2]
    gate, states, dt = torch.split(projected, [sizes.inner, sizes.conv_channels, sizes.heads], -1)
    convolved = causal_conv(states, weights.conv, weights.conv_bias, positions)
    x, b, c = torch.split(convolved, [sizes.inner, *[sizes.groups * sizes.state] * 2], -1)
    x = x.view(rows, length, sizes.heads, sizes.head_dim)
    b, c = (each.view(rows, length, sizes.groups, sizes.state) for each in (b, c))
    wide = torch.promote_types(projected.dtype, torch.float32)
    dt = functional.softplus(dt.to(wide) + weights.dt_bias.to(wide)).clamp(*sizes.dt_limits)
    decay = dt * -weights.a_log.to(wide).exp()
    v = (x * dt[..., None]).to(x.dtype)
    starts = None if positions is None else positions == 0
    if through is None:
        y = recurrence(c, b, v, decay, starts, sizes.chunk)
    else:
        y = through(c, b, v, decay, starts)
    y = y + x * weights.d.to(x.dtype)[:, None]
    return gated_norm(y.flatten(2), gate, weights.norm, sizes.groups, sizes.eps)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """silu of each channel's causal convolution of x [rows, length, channels]; weight [channels, 1, kernel].

    A sum of shifted rows, which a compiler makes one kernel of. With `positions` nothing is seen before a
    segment's start. Computed in float32 at least; returned in x's dtype.
    """
    length, kernel = x.shape[1], weight.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    padded = functional.pad(x, (0, 0, kernel - 1, 0))
    taps = weight[:, 0].to(wide)
    y = x.to(wide) * taps[:, -1]
    for back in range(1, kernel):
        earlier = padded[:, kernel - 1 - back :][:, :length].to(wide)
        if positions is not None:
            earlier = earlier.where(positions[..., None] >= back, 0.0)
        y = y + earlier * taps[:, kernel - 1 - back]
    if bias is not None:
        y = y + bias.to(wide)
    return functional.silu(y).to(x.dtype)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """x · silu(gate) over the root mean square of each group of its channels, times weight; in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gated = (x.to(wide) * functional.silu(gate.to(wide))).view(*x.shape[:-1], groups, -1)
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2).to(x.dtype) * weight


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    starts: torch.Tensor | None,
    chunk: int,
) -> torch.Tensor:
    """y_t = q_t·h_t with h_t = exp(decay_t)·h_(t-1) + k_t·v_tᵀ and h before the row zero, in chunks.

    q and k [rows, length, groups, state]; v [rows, length, heads, channels]; decay [rows, length, heads],
    logarithms, not above 0. starts [rows, length]: where the state before is forgotten. Returns [rows,
    length, heads, channels] in v's dtype; computed in decay's.

    Inside a chunk y is a masked attention without softmax; between chunks the states are carried on.
    """
    rows, length, groups, _ = q.shape
    dtype, wide, heads = v.dtype, decay.dtype, v.shape[2] // groups
    missing = -length % chunk

    def chunked(x: torch.Tensor) -> torch.Tensor:
        padding = (*[0] * (2 * (x.dim() - 2)), 0, missing)
        return functional.pad(x.to(wide), padding).view(rows, -1, chunk, *x.shape[2:])

    q, k = chunked(q), chunked(k)
    v = chunked(v.view(rows, length, groups, heads, -1))
    total = chunked(decay.view(rows, length, groups, heads)).cumsum(2)
    if starts is None:
        starts = torch.zeros(rows, length, device=q.device)
    segment = functional.pad(starts.to(torch.int64), (0, missing)).cumsum(1).view(rows, -1, chunk)
    last = segment[:, :, -1]
    before = functional.pad(last[:, :-1], (1, 0))

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    seen = (causal & (segment[:, :, :, None] == segment[:, :, None]))[..., None, None]
    between = (total[:, :, :, None] - total[:, :, None]).where(seen, -torch.inf).exp()
    scores = torch.einsum("rcign,rcjgn->rcijg", q, k)[..., None] * between
    y = torch.einsum("rcijgh,rcjghp->rcighp", scores, v)

    to_end = (
        (total[:, :, -1:] - total).where((segment == last[:, :, None])[..., None, None], -torch.inf).exp()
    )
    added = torch.einsum("rcjgn,rcjgh,rcjghp->rcghnp", k, to_end, v)
    kept = total[:, :, -1].where((last == before)[..., None, None], -torch.inf).exp()
    state, states = torch.zeros_like(added[:, 0]), []
    for index in range(added.shape[1]):
        states.append(state)
        state = state * kept[:, index, ..., None, None] + added[:, index]
    from_start = total.where((segment == before[:, :, None])[..., None, None], -torch.inf).exp()
    y = y + torch.einsum("rcign,rcghnp,rcigh->rcighp", q, torch.stack(states, 1), from_start)
    return y.flatten(3, 4).flatten(1, 2)[:, :length].to(dtype)
