# SPDX-License-Identifier: Apache-2.0
"""From a recipe to the fast path: what it can do, and how it is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lora_suite.blueprint.facts import Blueprint
from lora_suite.blueprint.targets import AdapterSite
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.backends.dtensor.adapters import attach_peft
from lora_suite.train.backends.dtensor.build import place
from lora_suite.train.backends.dtensor.fast.backend import FastBackend
from lora_suite.train.backends.dtensor.fast.decoder import STACKS, Decoder, Rotation
from lora_suite.train.backends.dtensor.fast.peft import TransformersDecoder
from lora_suite.train.backends.dtensor.parallel import build_mesh
from lora_suite.train.data.slicing import round_up
from lora_suite.train.fast.linears import FramedLinear, StackedLinear
from lora_suite.train.fast.masters import MasterWeights
from lora_suite.train.fast.mlp import kernel_ops
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.spec import DTYPES, LoraSpec
from lora_suite.train.models.causal_lm import build_on_meta, load_config, materialise_buffers, weight_source
from lora_suite.train.topology import Topology

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STACK_OF = {name: stack for stack, names in STACKS.items() for name in names}


def refusal(recipe: Recipe, blueprint: Blueprint, memory: int) -> str | None:
    """Why this training cannot take the fast path; None where it can. Names the key.

    memory: bytes of the device, of which the weights, which every rank holds whole, may take a half.
    """
    dtensor, lora = recipe.policy.dtensor_cfg, recipe.policy.dtensor_cfg.lora_cfg
    reasons = {
        "the model's shape is not known": blueprint.model is None,
        "tensor_parallel_size is above 1": dtensor.tensor_parallel_size > 1,
        "data.pad_to_max_length is off, so lengths vary": not recipe.data.pad_to_max_length,
        "the weights take more than half of the GPU's memory": 2 * _weight_bytes(recipe, blueprint) > memory,
        "activation_checkpointing is on": dtensor.activation_checkpointing,
        "lora_cfg.dropout is not 0": lora.enabled and lora.dropout > 0.0,
        "full SFT of several ranks is sharded": not lora.enabled and recipe.world_size > 1,
        "a linear outside the layers has an adapter": any(
            _place(site) is None for site in blueprint.adapters
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def build(
    recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device, *, gpu: bool
) -> Backend:
    """Build the fast backend of a recipe that `refusal` accepts; `torch.distributed` must be initialised.

    gpu: compile and capture. Raises ConfigError like the eager backend's build.
    """
    policy = recipe.policy
    dtype = DTYPES[policy.precision]
    _, topology = build_mesh(device, tp_size=1)
    config = load_config(recipe, recipe_path)
    shape = blueprint.model
    assert shape is not None, "refused where the shape is not known"
    lora = policy.dtensor_cfg.lora_cfg
    if lora.enabled and lora.implementation == "peft":
        return _build_peft(recipe, recipe_path, blueprint, topology, gpu=gpu)
    adapters: dict[str, dict[int, Adapter]] = {}
    bank = None
    if lora.enabled:
        spec = LoraSpec.from_config(lora, recipe.sft.seed)
        adapters = _adapters(blueprint.adapters, spec)
        bank = AdapterBank([each for stack in adapters.values() for each in stack.values()], topology, dtype)

    def make(name: str, inputs: int, widths: tuple[int, ...], bias: bool) -> StackedLinear | FramedLinear:
        if name in adapters:
            return FramedLinear(inputs, widths, bias, adapters[name], dtype, device)
        return StackedLinear(inputs, widths, bias, dtype, device)

    on_meta = build_on_meta(config, dtype)
    materialise_buffers(on_meta, device)
    model = Decoder(
        shape,
        config.rms_norm_eps,
        _rotation(on_meta, recipe, device),
        make,
        trained=bank is None,
        dtype=dtype,
        device=device,
        ops=kernel_ops() if gpu else None,
    )
    if bank is not None:
        for linear in model.linears():
            if isinstance(linear, StackedLinear):
                linear.requires_grad_(False)
    model.load(weight_source(recipe, recipe_path, config, device))
    if bank is not None:
        bank.build_optimizer(policy.optimizer)
        return FastBackend(model, topology, bank, gpu=gpu)
    masters = MasterWeights(list(model.parameters()), policy.optimizer, compiled=gpu)
    return FastBackend(model, topology, masters, gpu=gpu)


def _build_peft(
    recipe: Recipe, recipe_path: Path, blueprint: Blueprint, topology: Topology, *, gpu: bool
) -> Backend:
    """transformers' model with PEFT's layers, from the same weights and factors."""
    lora, device = recipe.policy.dtensor_cfg.lora_cfg, topology.device
    config, dtype = load_config(recipe, recipe_path), DTYPES[recipe.policy.precision]
    model = build_on_meta(config, dtype)
    spec = LoraSpec.from_config(lora, recipe.sft.seed)
    bank = attach_peft(model, blueprint.adapters, spec, topology, dtype)
    place(model, weight_source(recipe, recipe_path, config, device), device)
    bank.build_optimizer(recipe.policy.optimizer)
    return FastBackend(TransformersDecoder(model, _rotation(model, recipe, device)), topology, bank, gpu=gpu)


def _weight_bytes(recipe: Recipe, blueprint: Blueprint) -> int:
    return blueprint.total_params * DTYPES[recipe.policy.precision].itemsize


def _place(site: AdapterSite) -> tuple[str, int] | None:
    """The layer's stack and the position in it where a site's linear lies; None outside the layers."""
    parts = site.name.split(".")
    layer, linear = ".".join(parts[:3]), ".".join(parts[3:])
    stack = _STACK_OF.get(linear)
    return None if stack is None else (f"{layer}.{stack}", STACKS[stack].index(linear))


def _adapters(sites: Sequence[AdapterSite], spec: LoraSpec) -> dict[str, dict[int, Adapter]]:
    """Adapters by layer's stack and position."""
    made: dict[str, dict[int, Adapter]] = {}
    for site in sites:
        place = _place(site)
        assert place is not None, site.name
        made.setdefault(place[0], {})[place[1]] = Adapter(
            site.name, site.in_features, site.out_features, spec
        )
    return made


def _rotation(model: PreTrainedModel, recipe: Recipe, device: torch.device) -> Rotation:
    """Cosines and sines of every position that a row can have, by the model's own rotary module."""
    policy = recipe.policy
    length = round_up(policy.max_total_sequence_length, policy.make_sequence_length_divisible_by)
    positions = torch.arange(length, device=device)[None]
    x = torch.empty(1, dtype=DTYPES[policy.precision], device=device)
    cos, sin = model.get_submodule("model.rotary_emb")(x, positions)
    return cos[0], sin[0]
