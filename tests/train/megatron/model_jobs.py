# SPDX-License-Identifier: Apache-2.0
"""Models of each family, and what two ranks do with them for `test_models`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lora_suite.config import ConfigError, load_recipe
from lora_suite.train.checkpoint import Checkpoints, Meta, layout_of, lora_of
from tests.train.megatron.ranks import (
    ADAPTERS,
    FULL,
    LORA,
    build_layout,
    factors,
    global_batch,
    layout,
    logits,
    one_step,
    own_batches,
    placement,
    supervised,
    train_adapters,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 16384,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)),
    "llama3": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 32}, tie_word_embeddings=True)),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MOE = {
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
    "qwen3 moe bare": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False, tie_word_embeddings=True)
    ),
}
SPLITS = {"tp1": layout(tensor_model_parallel_size=1), "tp2": ()}
STAGES = layout(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
INPUT = torch.arange(48).view(2, 24) * 7 % 320

DROPPED = {
    position: layout(**{"lora_cfg.dropout": 0.5, "lora_cfg.dropout_position": position})
    for position in ("pre", "post")
}
RECOMPUTED, SEQUENCE = layout(activation_checkpointing="true"), layout(sequence_parallel="true")
EXCHANGED = layout(**{"lora_cfg.a2a_experimental": "true"})
# Ways to compute the same thing, under which masks must be the same.
WAYS = {
    "canonical": {
        "tp2": (),
        "sp": SEQUENCE,
        "sp recompute": SEQUENCE + RECOMPUTED,
        "sp a2a": SEQUENCE + EXCHANGED,
    },
    "fused": {"tp2": (), "sp a2a recompute": SEQUENCE + EXCHANGED + RECOMPUTED},
}


FUSED = layout(**{"lora_cfg.fused": "true"})
# The model whose adapters are exported, and in which layout they trained.
EXPORTS = {
    "export tp2": ("qwen2", ()),
    "export pp2": ("qwen2", STAGES),
    "export tp2 fused": ("qwen3", FUSED + SEQUENCE + EXCHANGED),
    "export pp2 fused": ("llama", FUSED + STAGES),
}


# Precision, whether the optimizer is distributed, and the layout.
OPTIMIZERS = {
    "distributed": ("float32", "true", SPLITS["tp1"]),
    "plain": ("float32", "false", SEQUENCE),
    "bfloat16 distributed": ("bfloat16", "true", SEQUENCE),
    "bfloat16": ("bfloat16", "false", SPLITS["tp1"]),
}


def pretrained(folder: Path) -> tuple[str, ...]:
    """Overrides that take a model from a folder."""
    return ("policy.init=pretrained", f"policy.model_name={folder}")


def weights(backend: Any) -> dict[str, Any]:
    """This rank's part of a model's own weights, and the place of its layers."""
    return {
        "first layer": backend.model.decoder.layers[0].layer_number - 1,
        "tp": backend.topology.tp.size,
        "parameters": {
            name: value.detach().clone()
            for name, value in backend.model.named_parameters()
            if "adapters" not in name
        },
    }


def expert_models(folder: Path) -> dict[str, Any]:
    """Logits and weights of models with experts, and a training of their adapters."""
    results: dict[str, Any] = {}
    for name in MOE:
        for split, overrides in {"tp1": SPLITS["tp1"], "pp2": STAGES}.items():
            backend = build_layout(LORA, *pretrained(folder / name), *overrides)
            results[f"{name} {split} weights"] = weights(backend)
            if split == "tp1":
                results[f"{name} {split}"] = logits(backend, INPUT)
    results["training"] = train_adapters(
        {
            split: (*pretrained(folder / "qwen3 moe"), *overrides)
            for split, overrides in {"dp2": SPLITS["tp1"], "pp2 recompute": STAGES + RECOMPUTED}.items()
        }
    )
    return results


def model_logits(folder: Path) -> dict[str, Any]:
    """Logits of each model at each tensor parallel size, and two steps of training over two ranks."""
    results: dict[str, Any] = {}
    for name in MODELS:
        for split, overrides in SPLITS.items():
            backend = build_layout(FULL, *pretrained(folder / name), *overrides)
            results[f"{name} {split}"] = logits(backend, INPUT)
        for split, overrides in {"tp2": (), "pp2": STAGES}.items():
            backend = build_layout(FULL, *pretrained(folder / name), *overrides)
            results[f"{name} {split} weights"] = weights(backend)
            results[f"{name} {split} losses"] = [one_step(backend)[0] for _ in range(2)]
    return results


def exported(folder: Path) -> dict[str, float]:
    """Train adapters a little and save them as a training does; the summed loss of the global batch then."""
    losses = {}
    for name, (model, overrides) in EXPORTS.items():
        words = (*pretrained(folder / model), *ADAPTERS, *overrides)
        recipe = load_recipe(LORA, words).recipe
        backend = build_layout(LORA, *words)
        one_step(backend)
        losses[name] = float(backend.topology.dp.sum(backend.evaluate(own_batches(backend))))
        meta = Meta(
            1, layout_of(recipe, backend.topology), lora_of(recipe), "", "", None, str(folder / model)
        )
        checkpoints = Checkpoints(folder / name, recipe.checkpointing, backend.topology)
        checkpoints.save(meta, {"backend": backend.state_dict()})
    return losses


def counts(folder: Path) -> dict[str, int]:
    """Adapters' parameters of a pretrained model, known beforehand or not, and of one with drawn experts."""
    experts = ("policy.model_name=models/tiny-qwen3-moe.json", *SPLITS["tp1"])
    return {
        "True": build_layout(LORA, *pretrained(folder / "llama")).trainable_parameters(),
        "False": build_layout(LORA, *pretrained(folder / "llama"), known=False).trainable_parameters(),
        "experts": build_layout(LORA, *experts).trainable_parameters(),
    }


def refusals() -> dict[str, str]:
    """What `build` says on this rank; "" where it builds."""
    said = {}
    for name, recipe, overrides in (
        ("bfloat16", FULL, ("policy.precision=bfloat16",)),
        ("empty stage", LORA, (*STAGES, *layout(**{"lora_cfg.target_modules": "[model.layers.0.*]"}))),
    ):
        try:
            build_layout(recipe, *overrides)
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    return said


def with_dropout() -> dict[str, Any]:
    """Loss, gradients and validation under dropout, which may not depend on how it is computed."""
    results = {}
    batches = global_batch()[:2]
    for position, dropped in DROPPED.items():
        for kind, ways in WAYS.items():
            for name, overrides in {"tp1": SPLITS["tp1"], **ways}.items():
                fused = layout(**{"lora_cfg.fused": str(kind == "fused").lower()})
                backend = build_layout(LORA, *ADAPTERS, *dropped, *fused, *overrides)
                plain = float(backend.evaluate(batches))
                loss = float(backend.forward_backward(batches, supervised(batches)))
                # Without tensor parallelism each rank has a whole model: nothing is to be summed.
                if name != "tp1":
                    backend.sync_gradients()
                bank = backend.bank
                results[f"{position} {kind} {name}"] = {
                    **placement(backend),
                    "index": backend.topology.dp.index,
                    "validation": plain,
                    "loss": loss,
                    "gradients": factors(backend, bank.gradient if name == "tp1" else bank.master_gradient),
                }
    return results


def resumed() -> dict[str, list[tuple[float, float]]]:
    """Two steps that follow two others, straight on and from a state that was loaded into a new backend."""
    results = {}
    for name, recipe, overrides in (
        ("full", FULL, ()),
        ("full sp", FULL, SEQUENCE),
        ("lora", LORA, (*ADAPTERS, *DROPPED["pre"])),
    ):
        backend = build_layout(recipe, *overrides)
        results[f"{name} first"] = [one_step(backend) for _ in range(2)]
        state = copy.deepcopy(backend.state_dict())
        results[f"{name} straight"] = [one_step(backend) for _ in range(2)]
        backend = build_layout(recipe, *overrides)
        backend.load_state_dict(state)
        results[f"{name} resumed"] = [one_step(backend) for _ in range(2)]
    return results


class _TypesAreCuda(TorchFunctionMode):
    """Answers that CPU tensors are CUDA's, which is all that megatron-core's optimizers ask for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result


def as_on_gpus(backend: Any, steps: int) -> list[tuple[float, float]]:
    """Steps of `one_step` with megatron-core's own optimizer."""
    from lora_suite.train.backends.megatron.compat import without_cuda

    with without_cuda(), _TypesAreCuda():
        return [one_step(backend) for _ in range(steps)]


def build_as_on_gpus(*overrides: str) -> Any:
    """The backend of a GPU, on the CPU."""
    from lora_suite.train.backends.megatron import construct

    with pytest.MonkeyPatch.context() as patch, _TypesAreCuda():
        patch.setattr(construct, "megatron_optimizer_runs", lambda *_: True)
        return build_layout(FULL, *overrides)


def optimizers() -> dict[str, Any]:
    """Curves under megatron-core's optimizers: straight on, from a loaded state, and under torch's AdamW."""
    results = {}
    for name, (precision, distributed, overrides) in OPTIMIZERS.items():
        keys = (
            f"policy.precision={precision}",
            "policy.optimizer.kwargs.weight_decay=1.0",
            *layout(**{"optimizer.use_distributed_optimizer": distributed}),
            *overrides,
        )
        backend = build_as_on_gpus(*keys)
        kind = type(backend.optimizer.inner).__name__
        first = as_on_gpus(backend, 2)
        state = copy.deepcopy(backend.state_dict())
        straight = as_on_gpus(backend, 2)
        backend = build_as_on_gpus(*keys)
        backend.load_state_dict(state)
        resumed = as_on_gpus(backend, 2)
        backend = build_layout(FULL, *keys, "policy.precision=float32")
        plain = [one_step(backend) for _ in range(4)]
        results[name] = {"kind": kind, "curve": first + straight, "resumed": resumed, "torch": plain}
    return results


def job(folder: Path) -> dict[str, Any]:
    """Everything in one start of the processes."""
    return {
        "logits": model_logits(folder),
        "experts": expert_models(folder),
        "dropout": with_dropout(),
        "states": resumed(),
        "optimizers": optimizers(),
        "exported": exported(folder),
        "counts": counts(folder),
        "refusals": refusals(),
    }
