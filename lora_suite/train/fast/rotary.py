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


def rotated(states: torch.Tensor, rotation: Rotation, heads: tuple[int, int], ops: RotaryOps | None) -> Heads:
    """Queries and keys rotated, and values, of states [rows, length, heads of all three, head_dim].

    rotation: of the row's slots. heads: of queries, and of keys, which are those of values. ops: kernels to
    use in training, of head sizes that are powers of two.
    """
    channels = states.shape[-1]
    if ops is not None and torch.is_grad_enabled() and channels & (channels - 1) == 0:
        apply = cast("Callable[..., Heads]", _Rotate.apply)
        return apply(states, *rotation, *heads, ops)
    query, key, value = torch.split(states, [heads[0], heads[1], heads[1]], 2)
    return rotate(query, rotation), rotate(key, rotation), value


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
        ops: RotaryOps,
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.ops = ops
        return ops.rotate(states, cos, sin, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ops.backward(*gradients, *ctx.saved_tensors), None, None, None, None, None
