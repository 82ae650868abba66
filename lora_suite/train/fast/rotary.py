# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys, by one kernel each way where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [positions, head_dim] of the rotary embedding, in the model's dtype."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values [rows, length, heads, head_dim]."""


@dataclass(frozen=True)
class RotaryOps:
    """`rotary_kernels.rotate` and `rotary_kernels.rotate_backward`."""

    rotate: Callable[..., Heads]
    backward: Callable[..., torch.Tensor]


def rotary_ops() -> RotaryOps:
    """The kernels; where Triton and a GPU are."""
    from lora_suite.train.fast import rotary_kernels as kernels

    return RotaryOps(kernels.rotate, kernels.rotate_backward)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding of x [rows, length, heads, channels]."""
    cos, sin = (each[None, :, None] for each in rotation)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def rotated(
    states: torch.Tensor,
    rotation: Rotation,
    heads: tuple[int, int],
    ops: RotaryOps | None,
    grouped: bool = False,
) -> Heads:
    """Queries and keys rotated, and values, of states [rows, length, heads of all three, head_dim].

    rotation: of the row's slots. heads: of queries, and of keys, which are those of values. ops: kernels to
    use in training, of head sizes that are powers of two. grouped: as of `apart`.
    """
    channels = states.shape[-1]
    if ops is not None and torch.is_grad_enabled() and channels & (channels - 1) == 0:
        apply = cast("Callable[..., Heads]", _Rotate.apply)
        return apply(states, *rotation, *heads, grouped, ops)
    query, key, value = apart(states, heads, grouped)
    return rotate(query, rotation), rotate(key, rotation), value


def apart(states: torch.Tensor, heads: tuple[int, int], grouped: bool) -> Heads:
    """Queries, keys and values of states [rows, length, heads of all three, head_dim].

    grouped: a key's queries, it and its value stand together, as Megatron has them; else all queries come
    first, then all keys.
    """
    if not grouped:
        query, key, value = torch.split(states, [heads[0], heads[1], heads[1]], 2)
        return query, key, value
    groups = states.reshape(*states.shape[:2], heads[1], -1, states.shape[3])
    query, key, value = torch.split(groups, [heads[0] // heads[1], 1, 1], 3)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


class _Rotate(torch.autograd.Function):
    """Values are copied beside, so that nothing keeps the states."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        grouped: bool,
        ops: RotaryOps,
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.ops, ctx.grouped = ops, grouped
        return ops.rotate(states, cos, sin, heads, kv_heads, grouped)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ops.backward(*gradients, *ctx.saved_tensors, ctx.grouped), *6 * (None,)
