# SPDX-License-Identifier: Apache-2.0
"""What a case says of itself in words that every trainer has, so that arms of different ones can be compared.

trainer, model (last part of its name, lower case), tokens_per_step (slots of the global batch: rows ×
sequence length), ranks, dtype, optimizer (class name, lower case), lora, and with LoRA lora_rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS = "lora-suite"
DECISIVE = ("model", "tokens_per_step")
"""Facts without which arms of different trainers cannot be compared at all."""

FACTS = ("trainer", *DECISIVE, "ranks", "dtype", "optimizer", "lora", "lora_rank")
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "float": "float32"}


def facts_of_recipe(tree: Mapping[str, Any], trainer: str) -> dict[str, object]:
    """The facts of a recipe in the keys that this project and NeMo-RL share; unknown ones are left out.

    tree: plain values by key, ours as resolved or theirs as merged.
    """
    policy = _block(tree, "policy")
    megatron = _block(policy, "megatron_cfg")
    is_megatron = megatron.get("enabled") is True
    backend = megatron if is_megatron else _block(policy, "dtensor_cfg")
    lora = _block(backend, "lora_cfg")
    cluster = _block(tree, "cluster")
    optimizer = (
        _block(megatron, "optimizer").get("optimizer")
        if is_megatron
        else _block(policy, "optimizer").get("name")
    )
    found = {
        "trainer": trainer,
        "model": policy.get("model_name"),
        "tokens_per_step": _product(
            policy.get("train_global_batch_size"), policy.get("max_total_sequence_length")
        ),
        "ranks": _product(cluster.get("num_nodes"), cluster.get("gpus_per_node")),
        "dtype": policy.get("precision"),
        # Megatron's adam has decoupled weight decay, which is AdamW.
        "optimizer": "adamw" if is_megatron and optimizer == "adam" else optimizer,
        "lora": lora.get("enabled"),
        "lora_rank": lora.get("dim") if lora.get("enabled") is True else None,
    }
    return normalised({name: value for name, value in found.items() if value is not None})


def normalised(facts: Mapping[str, object]) -> dict[str, object]:
    """Facts in one spelling: models and optimizers by their last name, dtypes by torch's."""
    made = dict(facts)
    if isinstance(model := made.get("model"), str):
        made["model"] = model.rstrip("/").rpartition("/")[2].removesuffix(".json").lower()
    if isinstance(optimizer := made.get("optimizer"), str):
        made["optimizer"] = optimizer.rpartition(".")[2].lower()
    if isinstance(dtype := made.get("dtype"), str):
        name = dtype.rpartition(".")[2].lower()
        made["dtype"] = _DTYPES.get(name, name)
    return made


def _block(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A block below a key, empty where there is none."""
    below = tree.get(key)
    return below if isinstance(below, Mapping) else {}


def _product(left: object, right: object) -> int | None:
    return left * right if type(left) is int and type(right) is int else None
