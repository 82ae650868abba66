# SPDX-License-Identifier: Apache-2.0
"""What megatron-core must be told of a decoder besides its sizes, and what it cannot build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_suite.blueprint.shape import ModelShape
from lora_suite.config.errors import ConfigError

# What megatron-core takes for granted in Llama 3's rotary scaling; only the factor is an argument.
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Architecture:
    """A Llama-like decoder: whole sizes, and the numbers that its configuration adds to them.

    rope_factor: factor of Llama 3's rotary scaling, None without it. init_std: of the first weights.
    routes_sum_to_one: whether the weights of a token's experts are divided by their sum.
    """

    shape: ModelShape
    norm_eps: float
    rope_base: float
    rope_factor: float | None
    init_std: float
    routes_sum_to_one: bool

    @classmethod
    def read(cls, shape: ModelShape, config: Mapping[str, Any]) -> Architecture:
        """Read a configuration with Hugging Face's keys.

        Raises ConfigError where GPTModel would compute another model.
        """
        if config.get("hidden_act", "silu") != "silu":
            raise _refusal("hidden_act", config["hidden_act"], "only silu is available")
        if config.get("use_sliding_window"):
            raise _refusal("use_sliding_window", True, "attention is always over the whole row")
        if config.get("output_router_logits"):
            raise _refusal("output_router_logits", True, "no loss of routers is trained")
        if shape.o_bias:
            raise _refusal("attention_bias", True, "only biases of q, k and v alone (qwen2) are available")
        if shape.mlp_bias:
            raise _refusal("mlp_bias", True, "MLPs have no biases")
        base, factor = _rope(config)
        return cls(
            shape,
            config["rms_norm_eps"],
            base,
            factor,
            config.get("initializer_range", 0.02),
            config.get("norm_topk_prob", False),
        )


def _rope(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Base and Llama 3 factor, from either form of the configuration (before and since transformers 5)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise _refusal("rope_type", kind, "default and llama3 are available")
    for key, value in LLAMA3_SCALING.items():
        if parameters[key] != value:
            raise _refusal(key, parameters[key], f"megatron-core has it fixed at {value}")
    return base, float(parameters["factor"])


def _refusal(key: str, value: object, hint: str) -> ConfigError:
    return ConfigError(
        f"policy.model_name: the megatron backend does not build a model with {key} {value!r}; {hint}, "
        f"or use policy.megatron_cfg.enabled=false policy.dtensor_cfg.enabled=true"
    )
