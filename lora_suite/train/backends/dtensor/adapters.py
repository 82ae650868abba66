# SPDX-License-Identifier: Apache-2.0
"""Put a blueprint's adapters beside the linears of a transformers model: ours, or those of the PEFT library.

Either way an `AdapterBank` owns the factors, their gradients and their optimizer, and both begin with the
same values. So two arms that differ in the implementation differ in nothing but what runs in a forward and a
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_suite.blueprint.targets import AdapterSite
from lora_suite.config.errors import ConfigError
from lora_suite.train.backends.dtensor.linear import LoraLinear
from lora_suite.train.backends.dtensor.parallel import placement_of
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.experts import ExpertAdapter, SharedExpertAdapter
from lora_suite.train.lora.spec import LoraSpec
from lora_suite.train.topology import Topology

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Attach = Callable[[nn.Module, Sequence[AdapterSite], LoraSpec, Topology, torch.dtype], AdapterBank]
_NAME = "default"
_WRAPPED = "base_layer"


def attach_adapters(
    model: nn.Module,
    sites: Sequence[AdapterSite],
    spec: LoraSpec,
    topology: Topology,
    dtype: torch.dtype,
) -> AdapterBank:
    """Freeze the model, put an adapter beside each site's linear, and return the bank that owns them all.

    Raises ConfigError naming a site that is not a linear of the model, or not one of its size.
    """
    _refuse_none(sites)
    adapters: list[Adapter] = []
    for site in sites:
        if site.stacked:
            adapters.append(_beside_experts(model, site, spec, topology))
    for site, linear in _linears(model, [site for site in sites if not site.stacked]):
        placement = placement_of(site.name) if topology.tp.size > 1 else "none"
        size = (site.in_features, site.out_features)
        adapter = Adapter(site.name, *size, spec, placement, topology.tp)
        LoraLinear.adapt(linear, adapter)
        adapters.append(adapter)
    model.requires_grad_(False)
    return AdapterBank(adapters, topology, dtype)


def _refuse_none(sites: Sequence[AdapterSite]) -> None:
    """Raise ConfigError where nothing would be adapted: only where the model's linears are not known."""
    if not sites:
        raise ConfigError(
            "policy.model_name: the architecture is not on this machine, so its linears are not known; "
            "save the model's config.json, with its _name_or_path, in a models/ folder beside the recipe"
        )


def _beside_experts(model: nn.Module, site: AdapterSite, spec: LoraSpec, topology: Topology) -> Adapter:
    """Put the adapter of a stack of routed experts beside it. Raises ConfigError."""
    from lora_suite.train.models.nemotron_h import stack_of

    size = (site.in_features, site.out_features)
    experts, stack = stack_of(model, site.name, size)
    if site.experts is None:
        shared = SharedExpertAdapter(site.name, *size, spec, form=experts.form)
        experts.adapter_for(stack, shared)
        return shared
    each = ExpertAdapter(site.name, *size, spec, site.experts, experts.form, topology.ep)
    experts.adapter_for(stack, each)
    return each


def attach_peft(
    model: nn.Module,
    sites: Sequence[AdapterSite],
    spec: LoraSpec,
    topology: Topology,
    dtype: torch.dtype,
) -> AdapterBank:
    """As `attach_adapters`, with PEFT's layers; their factors are the bank's. There is no tensor parallelism.

    Dropout is PEFT's own: on the adapter's input, drawn from torch's default generator.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _refuse_none(sites)
    names = [site.name for site, _ in _linears(model, sites)]
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]
        lora_dropout=spec.dropout,
        target_modules=names,
    )
    inject_adapter_in_model(config, model, _NAME, low_cpu_mem_usage=True)
    adapters = [
        PeftAdapter(
            site.name,
            site.in_features,
            site.out_features,
            spec,
            layer=model.get_submodule(site.name),  # type: ignore[arg-type]
        )
        for site in sites
    ]
    model.requires_grad_(False)
    bank = AdapterBank(adapters, topology, dtype)
    for adapter in adapters:
        adapter.hand_over()
    return bank


class PeftAdapter(Adapter):
    """The factors of one of PEFT's layers, as a bank sees them; it computes nothing itself."""

    def __init__(self, name: str, inputs: int, outputs: int, spec: LoraSpec, *, layer: LoraLayer) -> None:
        super().__init__(name, inputs, outputs, spec)
        # In a list, because it is no part of this module: it has this one's factors.
        self._layers = [layer]

    def hand_over(self) -> None:
        """Make the bank's factors the layer's own."""
        (layer,) = self._layers
        layer.lora_A[_NAME].weight = self.a
        layer.lora_B[_NAME].weight = self.b

    def switch(self, on: bool) -> None:
        """Whether the layer adds its adapter's output."""
        super().switch(on)
        (layer,) = self._layers
        layer.enable_adapters(on)


def plain_name(name: str) -> str:
    """A parameter's name as it was before PEFT put its layer around the linear."""
    return name.replace(f".{_WRAPPED}.", ".")


def _linears(model: nn.Module, sites: Sequence[AdapterSite]) -> list[tuple[AdapterSite, nn.Linear]]:
    """The linear of each site. Raises ConfigError."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = []
    for site in sites:
        linear = linears.get(site.name)
        size = (site.in_features, site.out_features)
        if linear is None or (linear.in_features, linear.out_features) != size:
            raise ConfigError(
                f"policy.dtensor_cfg.lora_cfg.target_modules: {site.name} is not a linear of {size[0]} by "
                f"{size[1]} channels in this {type(model).__name__}"
            )
        found.append((site, linear))
    return found
