# SPDX-License-Identifier: Apache-2.0
"""What is changed of transformers' NemotronH before it trains, the same with and without LoRA.

The module tree, its names and its arithmetic stay transformers'. Two forward passes are ours: that of the
stacks of routed experts, because theirs know neither adapters nor expert parallelism, and the entry of the
Mamba mixers, because theirs may hand the weight of `out_proj` to a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHExperts,
    NemotronHMamba2Mixer,
    NemotronHTopkRouter,
)

from lora_suite.config.errors import ConfigError
from lora_suite.train.batch import Segments
from lora_suite.train.lora.experts import ExpertAdapter, SharedExpertAdapter
from lora_suite.train.lora.grouped import Form, grouped_linear
from lora_suite.train.models.causal_lm import WeightSource
from lora_suite.train.models.initialise import Weight
from lora_suite.train.models.routing import Route
from lora_suite.train.topology import Axis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STACKS = ("up_proj", "down_proj")


class RoutedExperts(NemotronHExperts):
    """The experts of one layer, [experts of this rank, out, in] a stack, with adapters beside the stacks."""

    form: Form
    ep: Axis
    adapters: nn.ModuleDict

    @classmethod
    def adapt(cls, experts: NemotronHExperts, form: Form, ep: Axis) -> None:
        """Make a layer's experts ours, in place; of stacks on the meta device a rank keeps its share."""
        experts.__class__ = cls
        ours = cast(RoutedExperts, experts)
        ours.form, ours.ep, ours.adapters = form, ep, nn.ModuleDict()
        for name in STACKS if ep.size > 1 else ():
            stack = getattr(ours, name)
            setattr(ours, name, nn.Parameter(stack.data[: stack.shape[0] // ep.size].clone()))

    def adapter_for(self, name: str, adapter: ExpertAdapter | SharedExpertAdapter) -> None:
        """Put an adapter beside one of the stacks."""
        self.adapters[name] = adapter

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, channels], top_k_index and top_k_weights [tokens, choices]."""
        route = Route.of(top_k_index, self.num_experts, self.ep)
        inner = self.act_fn(self._times("up_proj", route.dispatch(hidden_states), route.offsets))
        outer = route.collect(self._times("down_proj", inner, route.offsets))
        return (outer * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _times(self, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        weight = cast(torch.Tensor, getattr(self, name))
        if name in self.adapters:
            return cast(torch.Tensor, self.adapters[name](rows, weight, offsets))
        return grouped_linear(rows, weight, offsets, self.form)


class CalledMixer(NemotronHMamba2Mixer):
    """A Mamba mixer that calls its linears, in training as well.

    With the mamba-ssm package a training mixer is one kernel that reads the weight of `out_proj` and never
    calls the module, so that an adapter on it gets no gradient
    (https://github.com/NVIDIA-NeMo/RL/pull/1866). transformers asks `training` for that alone, so here it
    stays false: convolution and scan still are the packages' kernels.
    """

    @classmethod
    def adapt(cls, mixer: NemotronHMamba2Mixer) -> None:
        """Make a mixer ours, in place."""
        mixer.__class__ = cls
        mixer.training = False

    def train(self, mode: bool = True) -> CalledMixer:
        """Set the mode of the modules within; adapters have dropout, the mixer has nothing that asks."""
        super().train(mode)
        self.training = False
        return self

    def forward(
        self, hidden_states: torch.Tensor, segments: Segments | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """[rows, length, channels]; of packed rows each segment begins with an empty state."""
        if segments is None:
            return cast(torch.Tensor, super().forward(hidden_states, **kwargs))
        parts = torch.split(hidden_states, list(segments.lengths), 1)
        return torch.cat([super(CalledMixer, self).forward(part, **kwargs) for part in parts], 1)


def prepare(model: PreTrainedModel, form: Form, ep: Axis) -> None:
    """Change a model on the meta device, in place: experts, mixers, and routers, which are frozen.

    form: how experts multiply. ep: the axis over which they are split.
    """
    for module in list(model.modules()):
        if isinstance(module, NemotronHExperts):
            RoutedExperts.adapt(module, form, ep)
        elif isinstance(module, NemotronHMamba2Mixer):
            CalledMixer.adapt(module)
    for router in routers(model):
        router.requires_grad_(False)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """The routers of all layers that have experts."""
    return (module for module in model.modules() if isinstance(module, NemotronHTopkRouter))


def expert_modules(model: nn.Module) -> Iterator[tuple[str, RoutedExperts]]:
    """The experts of every layer that has them, by full name."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield name, module


def stack_of(model: nn.Module, name: str, size: tuple[int, int]) -> tuple[RoutedExperts, str]:
    """The experts that hold the stack of that full name and (in, out), and its name there.

    Raises ConfigError.
    """
    owner, _, last = name.rpartition(".")
    experts = dict(expert_modules(model)).get(owner)
    stack = getattr(experts, last, None)
    if experts is None or stack is None or (stack.shape[2], stack.shape[1]) != size:
        raise ConfigError(
            f"policy.dtensor_cfg.lora_cfg.target_modules: {name} is no stack of experts of {size[0]} by "
            f"{size[1]} channels in this {type(model).__name__}"
        )
    return experts, last


def own_experts(source: WeightSource, ep: Axis) -> WeightSource:
    """A source that gives of every stack of experts this rank's share."""

    def share(weight: Weight) -> torch.Tensor:
        if len(weight.shape) != 3 or ".experts." not in weight.name:
            return source(weight)
        whole = Weight(weight.name, (weight.shape[0] * ep.size, *weight.shape[1:]))
        return source(whole).chunk(ep.size)[ep.index]

    return share
