# SPDX-License-Identifier: Apache-2.0
"""A transformers causal language model: built without memory, then given its weights part by part.

`build_on_meta` makes the module tree, on which layouts and adapters are planned. `materialise` then turns
any part of it into real tensors on the device, so that no rank ever holds more of a model than it keeps plus
the part in hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lora_suite.config.errors import ConfigError
from lora_suite.config.models import find_config
from lora_suite.config.paths import locate
from lora_suite.config.schema import Recipe
from lora_suite.train.lora.spec import DTYPES
from lora_suite.train.models import attention
from lora_suite.train.models.initialise import Weight, draw

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WeightSource = Callable[[Weight], torch.Tensor]
"""From a tensor's name and whole shape to its whole value, on any device and in any dtype."""


def load_config(recipe: Recipe, recipe_path: Path) -> PreTrainedConfig:
    """The model's transformers configuration, from a local JSON or, for a hub name, from the hub."""
    from transformers import AutoConfig

    name = recipe.policy.model_name
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(find_config(name, recipe_path) or name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{recipe_path}: policy.model_name: {name}: no configuration: {error}") from error
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"{recipe_path}: policy.model_name: {name}: a sliding window is not available; "
            "set use_sliding_window to false in its configuration, or name another model"
        )
    config.use_cache = False
    return config


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The module tree of a configuration with parameters and buffers on the meta device.

    dtype: of the parameters; what the model computes in float32 by itself (rotary frequencies) stays so.
    Attention is `attention.causal_attention`, torch's scaled_dot_product_attention.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention.register()
        )
    return model


def weight_source(
    recipe: Recipe, recipe_path: Path, config: PreTrainedConfig, device: torch.device
) -> WeightSource:
    """Where the weights come from: drawn on the device from ``sft.seed``, or read from a pretrained model.

    Drawn values are of the recipe's precision, like those of a checkpoint that is stored in it, also where
    float32 masters hold them: else a bfloat16 training would start from other weights on the backend whose
    masters are copies of bfloat16 weights. A pretrained model is read into host memory, whole, by every rank,
    and is freed with the source.
    """
    if recipe.policy.init == "random":
        std, seed, dtype = config.initializer_range, recipe.sft.seed, DTYPES[recipe.policy.precision]
        return lambda weight: draw(weight, std, seed, dtype, device)
    pretrained = _read_pretrained(recipe.policy.model_name, recipe_path)
    return lambda weight: pretrained[weight.name]


def _read_pretrained(name: str, recipe_path: Path) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers of a pretrained model by name, on the CPU, in their stored dtype."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(locate(name, recipe_path) or name, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{recipe_path}: policy.model_name: {name}: no weights: {error}") from error
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def materialise(module: nn.Module, module_name: str, source: WeightSource, device: torch.device) -> None:
    """Give every parameter and stored buffer of `module` on the meta device its value on `device`, in place.

    module_name: the module's full name, "" for the whole model. Of a tensor-parallel parameter (a DTensor) a
    rank keeps its shard. Parameters that are one (a tied head) stay one. Parameters that are real already
    (adapters) are left alone, so they can be views of a buffer.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for owner_name, owner in module.named_modules(prefix=module_name):
        tensors = [*owner.named_parameters(recurse=False), *_stored_buffers(owner)]
        for name, tensor in tensors:
            if not tensor.is_meta:
                continue
            if tensor not in made:
                weight = Weight(f"{owner_name}.{name}", tuple(tensor.shape))
                made[tensor] = _real(tensor, source(weight), device)
            setattr(owner, name, made[tensor])


def _stored_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own buffers that a checkpoint holds, such as the bias by which a router balances experts."""
    return [
        (name, buffer)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


@torch.no_grad()
def _real(tensor: torch.Tensor, whole: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A parameter or buffer like `tensor` with this rank's part of `whole`, which every rank holds."""
    value = whole.to(device, tensor.dtype)
    if isinstance(tensor, DTensor):
        # Without a source rank nothing is sent; the clone lets go of the whole, of which a shard is a view.
        sharded = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        value = sharded.clone(memory_format=torch.contiguous_format)
    if not isinstance(tensor, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


@torch.no_grad()
def materialise_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Recompute on `device` the buffers that no checkpoint holds, such as rotary frequencies.

    transformers does the same after loading weights: `_init_weights` of a module that owns buffers alone.
    """
    for name, module in model.named_modules():
        stored = [key for key, _ in _stored_buffers(module)]
        buffers = [
            key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta and key not in stored
        ]
        if not buffers:
            continue
        if next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"{name} has buffers ({', '.join(buffers)}) beside parameters: no rule fills them"
            )
        for key in buffers:
            empty = torch.full_like(getattr(module, key), torch.nan, device=device)
            module.register_buffer(key, empty, persistent=key not in module._non_persistent_buffers_set)
        model._init_weights(module)  # type: ignore[no-untyped-call]
        if any(not bool(getattr(module, key).isfinite().all()) for key in buffers):
            raise ValueError(f"{name}: transformers does not fill the buffers {', '.join(buffers)}")
