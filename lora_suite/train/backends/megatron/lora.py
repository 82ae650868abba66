# SPDX-License-Identifier: Apache-2.0
"""LoRA inside megatron-core's column- and row-parallel linears, before their collectives.

Both classes override the one hook through which megatron-core multiplies, `_forward_impl`. So an adapter's
output joins the linear's own partial output, and its input gradient joins the linear's own partial input
gradient: no collective is added, and none is done twice.

    column: y_r = x·W_rᵀ + x·Aᵀ·B_rᵀ      A replicated, its gradient partial over tensor parallel ranks
    row:    y   = Σ_r (x_r·W_rᵀ + x_r·A_rᵀ·Bᵀ)      B replicated, its gradient partial

The partial gradients are summed once a step, by the adapter bank. Under sequence parallelism x arrives as a
slice of the sequence; it is gathered once for base and adapter, and the sum is reduce-scattered once, so
the same factors' gradients are partial as without it.

`ExchangedAdapter` is the other way for row-parallel linears under sequence parallelism, with two collectives
of its own (`a2a_experimental`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import nn
from torch.nn import functional

from lora_suite.train.lora.adapter import Adapter


class GatedAdapter(Adapter):
    """The one adapter of a fused gate/up linear. Whole B is [gate; up]; a rank holds its rows of both."""

    def local_part(self, factor: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole factor."""
        if self.sharded_dim(factor) != 0:
            return super().local_part(factor, whole)
        return torch.cat([half.chunk(self.tp.size)[self.tp.index] for half in whole.chunk(2)])

    def _keep(self, x: torch.Tensor, channels: int, shard: bool) -> torch.Tensor | None:
        """Masks of gate and of up apart, so that a rank's part of each does not depend on the split."""
        if not shard:
            return super()._keep(x, channels, shard)
        gate, up = (super(GatedAdapter, self)._keep(x, channels // 2, shard) for _ in range(2))
        return None if gate is None or up is None else torch.cat([gate, up], -1)


class ExchangedAdapter(Adapter):
    """A row-parallel linear's adapter under sequence parallelism, which goes by way of the output's channels.

        t = Σ_r x_r·A_rᵀ                 [length, rows, rank], summed over the ranks
        u_r = s·t·B_rᵀ                   [length, rows, out / tp], this rank's channels of the output
        all-to-all of the u_r            [length / tp, rows, out], this rank's slice of the sequence

    It is added *after* the linear's own reduce-scatter. Both factors are split, B by rows, so no gradient is
    partial. The same function as the plain placement, which needs neither collective; this is what
    `a2a_experimental` means in Megatron-Bridge (`ParallelLinearAdapter` with `use_a2a`).
    """

    def sharded_dim(self, factor: str) -> int | None:
        """The dim over which tp ranks split the factor."""
        return 1 if factor == "a" else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [length, rows, in / tp] to [length / tp, rows, out]."""
        spec = self.spec
        if spec.dropout_position == "pre":
            x = self._dropped(x, self._keep(x, x.shape[-1], shard=True))
        # Summed forward, and its gradient backward: every rank has another part of B to multiply it with.
        inner = reduce_from_tensor_model_parallel_region(functional.linear(x, self.a), group=self.tp.group)
        inner = copy_to_tensor_model_parallel_region(inner, group=self.tp.group)
        update = functional.linear(inner, self.b) * spec.scale
        if spec.dropout_position == "post":
            update = self._dropped(update, self._keep(update, update.shape[-1], shard=True))
        exchanged: torch.Tensor = all_to_all_hp2sp(update, group=self.tp.group)
        return exchanged.view(-1, x.shape[1], self.out_features)


class AdapterGroup(nn.Module):
    """The adapters beside one Megatron linear: one for each linear that it holds, or for some of them.

    widths: output features of each held linear on this rank, in order. groups: how often they alternate in
    the output (q, k, v of each group of heads in turn; gate and up: once). adapters: by the held linear's
    position.
    """

    def __init__(self, widths: Sequence[int], groups: int, adapters: Mapping[int, Adapter]) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.groups = groups
        self.by_position = dict(adapters)
        self.adapters = nn.ModuleList(adapters.values())
        self._states: deque[torch.Tensor] = deque()

    @property
    def enabled(self) -> bool:
        """Whether any of the adapters is switched on."""
        return any(adapter.enabled for adapter in self.by_position.values())

    @property
    def reduced(self) -> bool:
        """Whether the output is no part of a sum, so that it joins after the linear's own reduction."""
        return any(isinstance(adapter, ExchangedAdapter) for adapter in self.by_position.values())

    def add(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The linear's own output for x, plus the adapters' where they are switched on."""
        if not self.enabled:
            return output
        update: torch.Tensor = self(x)
        return output + update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The adapters' joint output [length, rows, out (this rank's part)], zero where there is none."""
        generator = next(iter(self.by_position.values())).generator
        if generator is None or not self.training or not is_checkpointing():
            return self._joined(x)
        if not torch.is_grad_enabled():
            self._states.append(generator.get_state())
            return self._joined(x)
        # Recomputation, in the order of the first passes: draw the masks of the first pass again.
        now = generator.get_state()
        generator.set_state(self._states.popleft())
        joined = self._joined(x)
        generator.set_state(now)
        return joined

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        updates: dict[int, torch.Tensor] = {
            position: adapter(x.to(adapter.a.dtype)).to(x.dtype)
            for position, adapter in self.by_position.items()
        }
        if len(self.widths) == 1:
            return updates[0]
        parts = []
        for position, width in enumerate(self.widths):
            shape = (*x.shape[:-1], self.groups, width // self.groups)
            update = updates.get(position)
            parts.append(x.new_zeros(()).expand(shape) if update is None else update.view(shape))
        return torch.cat(parts, -1).flatten(-2)


class LoraColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's column-parallel linear with adapters on its whole input."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: AdapterGroup | None = None

    def adapt(self, group: AdapterGroup) -> None:
        """Add what these adapters give."""
        self.adapters = group

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        adapted = self.adapters is not None and self.adapters.enabled
        if adapted and kwargs["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, group=self.tp_group)
        elif adapted and kwargs["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        if adapted:
            kwargs |= {"sequence_parallel": False, "allreduce_dgrad": False}
        output: torch.Tensor = super()._forward_impl(input=input, weight=weight, **kwargs)
        return self.adapters.add(output, input) if self.adapters is not None else output


class LoraRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """megatron-core's row-parallel linear with an adapter on this rank's part of its input."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: AdapterGroup | None = None

    def adapt(self, group: AdapterGroup) -> None:
        """Add what these adapters give."""
        self.adapters = group

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        partial: torch.Tensor = super()._forward_impl(input=input, weight=weight, **kwargs)
        if self.adapters is None or self.adapters.reduced:
            return partial
        return self.adapters.add(partial, input)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [length, rows, in / tp] to the whole output, or its slice of the sequence, and the bias."""
        output, bias = super().forward(input_)
        if self.adapters is not None and self.adapters.reduced:
            output = self.adapters.add(output, input_)
        return output, bias
