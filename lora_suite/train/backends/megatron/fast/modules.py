# SPDX-License-Identifier: Apache-2.0
"""What the fast path puts into megatron-core's layers, with and without adapters alike.

Linears multiply by themselves, so that a compiler sees one product and a collective that it can order: each
is megatron-core's own in what it holds, and another in how it computes. A linear with adapters holds its
weight inside a frame of their factors (`train/fast/linears.py`). Under tensor parallelism a frame is this
rank's: its rows of W and B, its columns of W and A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.nn import functional

from lora_suite.train.backends.megatron.lora import AdapterGroup
from lora_suite.train.backends.megatron.modules import PackedRows, RMSNorm, SdpaAttention
from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.linears import FramedLinear
from lora_suite.train.fast.mlp import GatedOps, gated_activation, gated_mlp
from lora_suite.train.models.attention import Blocks
from lora_suite.train.topology import Axis

Group = torch.distributed.ProcessGroup


def _axis(group: Group) -> TensorParallel:
    return TensorParallel.over(Axis(group.rank(), group.size(), group))


class Framable(nn.Module):
    """What both kinds of linear have in common; weight and bias are megatron-core's parameters."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    tp_group: Group
    frame: FramedLinear | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frame = None
        self.tp = _axis(self.tp_group)

    def adapt(self, group: AdapterGroup) -> None:
        """Move weight and bias, still to be loaded, into a frame of these adapters."""
        rows, columns = self.weight.shape
        widths = group.widths if len(group.widths) > 1 else (rows,)
        self.frame = FramedLinear(
            columns,
            widths,
            self.bias is not None,
            group.by_position,
            self.weight.dtype,
            self.weight.device,
            group.groups,
        )
        self.weight.data = self.frame.weight
        if self.bias is not None and self.frame.bias is not None:
            self.bias.data = self.frame.bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in (this rank's part)] to this rank's part of the output or of its sum."""
        if self.frame is not None:
            y: torch.Tensor = self.frame(x)
            return y
        return functional.linear(x, self.weight, self.bias)


class FastColumnParallelLinear(Framable, ColumnParallelLinear):  # type: ignore[misc]
    """A linear split by output. Its input's gradient is summed over ranks, base and adapters in one."""

    def forward(self, input_: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """x [length, rows, in] to this rank's part [length, rows, out / tp], the bias in it."""
        y = self.product(self.tp.enter(input_.flatten(0, 1)))
        return y.view(*input_.shape[:2], -1), None


class FastRowParallelLinear(Framable, RowParallelLinear):  # type: ignore[misc]
    """A linear split by input, without a bias. Its output is summed over ranks, base and adapters in one."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """x [length, rows, in / tp] to [length, rows, out]."""
        y = self.tp.leave(self.product(input_.flatten(0, 1)))
        return y.view(*input_.shape[:2], -1), None


class FastMLP(MLP):  # type: ignore[misc]
    """megatron-core's gated MLP as one operation between the two collectives.

    Made of a plain one, whose linears it takes: TransformerLayer knows by their class which MLPs it can
    build. ops: kernels of the activation, on GPUs.
    """

    def __init__(self, plain: MLP, ops: GatedOps | None) -> None:
        MegatronModule.__init__(self, plain.config)
        self.linear_fc1: FastColumnParallelLinear = plain.linear_fc1
        self.linear_fc2: FastRowParallelLinear = plain.linear_fc2
        self.ops = ops

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """[length, rows, hidden] to the same."""
        first, second = self.linear_fc1, self.linear_fc2
        x = first.tp.enter(hidden_states.flatten(0, 1))
        if first.frame is not None and second.frame is not None:
            y = gated_mlp(x, first.frame, second.frame, self.ops)
        else:
            y = second.product(gated_activation(first.product(x), self.ops))
        return second.tp.leave(y).view(hidden_states.shape), None


class HeadNorm(RMSNorm):
    """The norm of queries' or keys' heads: a rank sees its own, so the gradient is a part of a sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.tp = _axis(parallel_state.get_tensor_model_parallel_group())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [length, rows, heads, head_dim] to the same."""
        return functional.rms_norm(x, self.normalized_shape, self.tp.enter(self.weight), self.eps)


class Slots(NamedTuple):
    """What attention must know of a row's slots.

    cos, sin: of their rotary angles, [slots, 1, 1, head_dim], in the model's dtype. blocks: of packed rows.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    blocks: Blocks | None

    @classmethod
    def of(cls, angles: torch.Tensor, blocks: Blocks | None, dtype: torch.dtype) -> Slots:
        """From the angles of every position; packed rows begin at the first."""
        if blocks is not None:
            angles = angles[blocks.positions[0]]
        return cls(angles.cos().to(dtype), angles.sin().to(dtype), blocks)


class FastAttention(SdpaAttention):
    """Attention that rotates queries and keys itself, by cosines and sines that are computed once a pass.

    megatron-core's layer hands its mask through to here, and would take the cosine of each angle for every
    head and layer: compiled, that costs three times what reading and writing queries and keys does.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """As `SdpaAttention`'s; attention_mask: `Slots`."""
        slots: Slots = attention_mask
        query, key = _rotated(query, slots), _rotated(key, slots)
        return super().forward(query, key, value, slots.blocks, packed_seq_params)


def _rotated(states: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Rotary embedding of [slots, rows, heads, head_dim]."""
    left, right = states.chunk(2, -1)
    return states * slots.cos + torch.cat([-right, left], -1) * slots.sin
