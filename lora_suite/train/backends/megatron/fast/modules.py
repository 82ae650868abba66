# SPDX-License-Identifier: Apache-2.0
"""What the fast path puts into megatron-core's layers, with and without adapters alike.

Linears multiply by themselves, so that a compiler sees one product and a collective that it can order: each
is megatron-core's own in what it holds, and another in how it computes. A linear with adapters holds its
weight inside a frame of their factors (`train/fast/linears.py`). Under tensor parallelism a frame is this
rank's: its rows of W and B, its columns of W and A.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.nn import functional

from lora_suite.train.backends.megatron.lora import AdapterGroup
from lora_suite.train.backends.megatron.modules import RMSNorm
from lora_suite.train.fast.collectives import TensorParallel
from lora_suite.train.fast.entry import Norm, NormOps, by_kernels, normed, normed_linear
from lora_suite.train.fast.layer_ops import LayerOps
from lora_suite.train.fast.linears import FramedLinear
from lora_suite.train.fast.mlp import gated_activation, normed_mlp
from lora_suite.train.fast.rotary import Rotation, apart, rotate, rotated
from lora_suite.train.models.attention import Blocks, attend_in_rows
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
    """A linear split by output. `FastLayer` sums its input's gradient, base's and adapters' in one."""


class FastRowParallelLinear(Framable, RowParallelLinear):  # type: ignore[misc]
    """A linear split by input, without a bias. `FastLayer` sums its output, base's and adapters' in one."""


class HeadNorm(RMSNorm):
    """The norm of queries' or keys' heads: a rank sees its own, so the gradient is a part of a sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.tp = _axis(parallel_state.get_tensor_model_parallel_group())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, length, heads, head_dim] to the same."""
        return functional.rms_norm(x, self.normalized_shape, self.tp.enter(self.weight), self.eps)


def normed_sum(
    x: torch.Tensor, fed: torch.Tensor | None, norm: RMSNorm, ops: NormOps | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of x and fed [tokens, hidden], and the sum itself; ops: kernels for training."""
    ours = Norm(norm.weight, norm.eps, ops)
    if by_kernels(ours):
        return normed(x, fed, ours)
    states = x if fed is None else x + fed
    return norm(states), states


class FastLayer(nn.Module):
    """megatron-core's TransformerLayer, whose modules it takes under their names, in another way through.

    States come and go in two parts, whose sum belongs to the next norm, in rows of slots instead of slots of
    rows. ops: kernels of what stands between the products.
    """

    def __init__(self, plain: TransformerLayer, ops: LayerOps) -> None:
        super().__init__()
        self.input_layernorm: RMSNorm = plain.input_layernorm
        self.self_attention: SelfAttention = plain.self_attention
        self.pre_mlp_layernorm: RMSNorm = plain.pre_mlp_layernorm
        self.mlp: MLP = plain.mlp
        self.ops = ops

    def forward(
        self, x: torch.Tensor, fed: torch.Tensor | None, rotation: Rotation, blocks: Blocks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts [rows, length, hidden], of which the first layer has one, to both parts.

        rotation: of the row's slots, [length, head_dim]. blocks: of packed rows, which are x's only one.
        """
        tokens = x.flatten(0, 1)
        before = None if fed is None else fed.flatten(0, 1)
        attention = self.self_attention
        states, residual = self._entered(tokens, before, self.input_layernorm, attention.linear_qkv)
        heads = states.view(*x.shape[:2], -1, attention.hidden_size_per_attention_head)
        mixed = self._attend(heads, rotation, blocks)
        made, residual = self._mlp(residual, mixed)
        return residual.view(x.shape), made.view(x.shape)

    def _entered(
        self, x: torch.Tensor, fed: torch.Tensor | None, norm: RMSNorm, linear: FastColumnParallelLinear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The linear of the normalised sum of x and fed, and the sum."""
        ours = Norm(norm.weight, norm.eps, self.ops.norm)
        if linear.frame is not None and by_kernels(ours):
            return normed_linear(x, fed, ours, linear.frame, linear.tp)
        normal, states = normed_sum(x, fed, norm, self.ops.norm)
        return linear.product(linear.tp.enter(normal)), states

    def _attend(self, states: torch.Tensor, rotation: Rotation, blocks: Blocks | None) -> torch.Tensor:
        """States [rows, length, heads of queries, keys and values, head_dim] to [tokens, hidden]."""
        attention = self.self_attention
        heads = (attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition)
        if attention.q_layernorm is not None:
            query, key, value = apart(states, heads, grouped=True)
            query = rotate(attention.q_layernorm(query), rotation)
            key = rotate(attention.k_layernorm(key), rotation)
        else:
            query, key, value = rotated(states, rotation, heads, self.ops.rotary, grouped=True)
        context = attend_in_rows(query, key, value, blocks)
        linear: FastRowParallelLinear = attention.linear_proj
        return linear.tp.leave(linear.product(context.reshape(states.shape[0] * states.shape[1], -1)))

    def _mlp(self, x: torch.Tensor, fed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The MLP of the normalised sum of x and fed, and the sum."""
        first: FastColumnParallelLinear = self.mlp.linear_fc1
        second: FastRowParallelLinear = self.mlp.linear_fc2
        norm = Norm(self.pre_mlp_layernorm.weight, self.pre_mlp_layernorm.eps, self.ops.norm)
        if first.frame is not None and second.frame is not None and by_kernels(norm):
            made, states = normed_mlp(x, fed, norm, first.frame, second.frame, self.ops.gated, first.tp)
        else:
            gate_up, states = self._entered(x, fed, self.pre_mlp_layernorm, first)
            made = second.product(gated_activation(gate_up, self.ops.gated))
        return second.tp.leave(made), states
