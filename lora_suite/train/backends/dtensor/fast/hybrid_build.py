# SPDX-License-Identifier: Apache-2.0
"""From a recipe to a plain NemotronH: what it cannot do, and how it is built."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_suite.blueprint.shape import HybridShape, ModelShape
from lora_suite.config.errors import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.dtensor.fast.decoder import MakeLinear
from lora_suite.train.backends.dtensor.fast.hybrid import HybridDecoder, Parts
from lora_suite.train.fast.collectives import ExpertParallel
from lora_suite.train.fast.experts import Experts, FramedExperts, StackedExperts
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.experts import ExpertAdapter
from lora_suite.train.models.mamba import MambaSizes, Recurrence
from lora_suite.train.models.router import Routes
from lora_suite.train.topology import Axis

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def hybrid_refusals(recipe: Recipe, hybrid: HybridShape) -> dict[str, bool]:
    """Why a hybrid model cannot take the fast path, and whether that holds."""
    dtensor = recipe.policy.dtensor_cfg
    lora = dtensor.lora_cfg
    sizes = (hybrid.state_size, hybrid.mamba_head_dim)
    return {
        # Elsewhere experts are multiplied one by one, and how many rows each has is read on the host.
        "precision is not bfloat16, and experts' grouped products know no other": (
            recipe.policy.precision != "bfloat16"
        ),
        "experts_implementation is loop": dtensor.experts_implementation == "loop",
        "lora_cfg.implementation is peft, and the model is a hybrid": lora.enabled
        and lora.implementation == "peft",
        "lora_cfg.experts is shared": lora.enabled and lora.experts == "shared",
        "triton, which the kernels of Mamba layers need, is not installed (pip install triton)": (
            find_spec("triton") is None
        ),
        # Rows of the grouped products must begin at multiples of 16 bytes.
        "moe_intermediate_size is no multiple of 8": hybrid.expert_intermediate % 8 > 0,
        "ssm_state_size or mamba_head_dim is no power of two from 16 on": any(
            size < 16 or size & (size - 1) for size in sizes
        ),
    }


def build_hybrid(
    shape: ModelShape,
    config: PreTrainedConfig,
    make: MakeLinear,
    adapters: Mapping[str, Mapping[int, Adapter]],
    *,
    ep: Axis,
    trained: bool,
    dtype: torch.dtype,
    device: torch.device,
    gpu: bool,
) -> HybridDecoder:
    """The decoder of a hybrid model, without values.

    make: of each stack of linears. adapters: by stack and position. ep: the axis over which experts are
    split. trained: whether its tensors train, except the routers. gpu: whether the kernels compute the
    recurrence. Raises ConfigError for a model that has what these layers have not.
    """
    hybrid = shape.hybrid
    assert hybrid is not None
    unlike = {
        "moe_latent_size": (config.moe_latent_size, None),
        "mlp_hidden_act": (config.mlp_hidden_act, "relu2"),
        "mamba_hidden_act": (config.mamba_hidden_act, "silu"),
    }
    for key, (found, known) in unlike.items():
        if found != known:
            raise ConfigError(
                f"policy.model_name: the model's {key} is {found}, and the fast path knows {known} alone; "
                f"set policy.dtensor_cfg.fast_path to off"
            )

    def experts(name: str, count: int, inputs: int, out: int) -> Experts:
        if name not in adapters:
            return StackedExperts(count, inputs, out, dtype, device)
        adapter = adapters[name][0]
        assert isinstance(adapter, ExpertAdapter)
        return FramedExperts(count, inputs, out, adapter, dtype, device)

    def tensor(*size: int, wide: bool = False) -> nn.Parameter:
        kind = torch.promote_types(dtype, torch.float32) if wide else dtype
        return nn.Parameter(torch.empty(size, dtype=kind, device=device), requires_grad=trained)

    eps = config.layer_norm_epsilon
    # As transformers has it: dt has no upper limit, whatever the configuration says.
    limits = (config.time_step_min, float("inf"))
    routes = Routes(
        hybrid.experts,
        hybrid.experts_per_token,
        config.n_group,
        config.topk_group,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )
    mamba = MambaSizes.of(hybrid, config.chunk_size, eps, limits)
    through = _kernels() if gpu else None
    ranks = ExpertParallel.over(ep)
    return HybridDecoder(Parts(shape, mamba, routes, eps, through, make, experts, tensor, ranks))


def _kernels() -> Recurrence:
    from lora_suite.train.fast.scan import through_kernels

    return through_kernels
