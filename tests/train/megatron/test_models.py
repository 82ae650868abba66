# SPDX-License-Identifier: Apache-2.0
"""Pretrained models of each family compute transformers' logits; dropout and checkpoints survive a split."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lora_suite.blueprint.shape import read_shape
from lora_suite.config import ConfigError, load_recipe
from lora_suite.train.backends.megatron.weights import ShardMap
from lora_suite.train.checkpoint import Checkpoints, Meta, layout_of, lora_of
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.export import export_adapter
from lora_suite.train.topology import Axis
from tests.train.megatron import reference
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
    run_ranks,
    supervised,
    train_adapters,
    whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.train]

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
    """Adapters' parameters of a pretrained model, known before its weights are read or not."""
    return {
        str(known): build_layout(LORA, *pretrained(folder / "llama"), known=known).trainable_parameters()
        for known in (True, False)
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each model as transformers saves it; biases are not left at zero."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    for name, make in (MODELS | MOE).items():
        model = make()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(job, tmp_path_factory.mktemp("ranks"), models)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, results, models):
    model = AutoModelForCausalLM.from_pretrained(models / name)
    with torch.no_grad():
        expected = model(INPUT).logits
    for rank in results:
        for split in SPLITS:
            torch.testing.assert_close(rank["logits"][f"{name} {split}"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MOE)
def test_logits_of_a_model_with_experts_are_those_of_transformers(name, results, models):
    model = AutoModelForCausalLM.from_pretrained(models / name)
    with torch.no_grad():
        expected = model(INPUT).logits
    for rank in results:
        torch.testing.assert_close(rank["experts"][f"{name} tp1"], expected, rtol=1e-4, atol=1e-4)


def test_adapters_beside_experts_train_as_merged_weights_do_in_transformers(results, models):
    # transformers' other ways to compute experts know no float64.
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3 moe", experts_implementation="eager")
    model = reference.in_float64(model)
    base = {name: value.detach() for name, value in model.state_dict().items()}
    first = {
        key: value for rank in results for key, value in rank["experts"]["training"]["dp2"]["first"].items()
    }
    theirs = reference.train(model, first, lambda factors: reference.merged(base, factors))
    for rank in results:
        for ours in rank["experts"]["training"].values():
            assert ours["count"] == 7_168  # 2 · 8 · (128 + 96 + 96 + 128): q, k, v, o
            # Both take the softmax over experts in float32.
            for step, plain in zip(ours["curve"], theirs["curve"], strict=True):
                assert step == pytest.approx(plain, rel=1e-6)
            for key, value in ours["last"].items():
                torch.testing.assert_close(value, theirs["last"][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("split", ["tp2", "pp2"])
@pytest.mark.parametrize("name", MODELS | MOE)
def test_shards_joined_are_the_model_as_it_was_saved_bit_by_bit(name, split, results, models):
    kind, split = ("experts", "tp1" if split == "tp2" else split) if name in MOE else ("logits", split)
    ranks = [rank[kind][f"{name} {split} weights"] for rank in results]
    shards = ShardMap(read_shape(models / name / "config.json"), Axis(0, 1))
    joined: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for key, value in rank["parameters"].items():
            parts = [each["parameters"][key] for each in ranks] if rank["tp"] > 1 else [value]
            joined |= shards.whole(key, rank["first layer"], parts)
    saved = load_file(models / name / "model.safetensors")
    assert joined.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(joined[key], value)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_a_pretrained_model_like_transformers(name, results, models):
    model = AutoModelForCausalLM.from_pretrained(models / name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, (0.9, 0.98), 1e-8, 0.01)
    for step in range(2):
        losses = [model(b.input_ids).logits.flatten(0, 1) for b in global_batch()]
        total = sum(
            torch.nn.functional.cross_entropy(each, b.labels.flatten(), ignore_index=-100, reduction="sum")
            for each, b in zip(losses, global_batch(), strict=True)
        )
        loss = total / supervised(global_batch())
        for rank in results:
            for split in ("tp2", "pp2"):
                ours = rank["logits"][f"{name} {split} losses"][step]
                assert ours == pytest.approx(float(loss.detach()), rel=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("position", DROPPED)
def test_dropout_masks_depend_neither_on_the_split_nor_on_recomputation(position, kind, results):
    # In the layout without tensor parallelism rank 0 draws like the only copy of the model in the others.
    alone = results[0]["dropout"][f"{position} {kind} tp1"]
    assert alone["index"] == 0
    assert abs(alone["loss"] - alone["validation"]) > 1e-3 * alone["loss"]
    for way in WAYS[kind]:
        ranks = [rank["dropout"][f"{position} {kind} {way}"] for rank in results]
        for ours in ranks:
            assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-11)
            assert ours["validation"] == pytest.approx(alone["validation"], rel=1e-11)
        gradients = whole(ranks, "gradients")
        assert gradients.keys() == alone["gradients"].keys()
        for key, gradient in alone["gradients"].items():
            torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["full", "full sp", "lora"])
def test_a_loaded_state_continues_as_if_nothing_had_happened(name, results):
    for rank in results:
        states = rank["states"]
        assert states[f"{name} resumed"] == states[f"{name} straight"]
        assert states[f"{name} resumed"] != states[f"{name} first"]


@pytest.mark.parametrize("name", ["distributed", "plain", "bfloat16 distributed", "bfloat16"])
def test_megatron_core_s_optimizers_mean_the_same_as_torch_s(name, results):
    kinds = {
        "distributed": "DistributedOptimizer",
        "plain": "FP32Optimizer",
        "bfloat16 distributed": "DistributedOptimizer",
        "bfloat16": "Float16OptimizerWithFloat16Params",
    }
    for rank in results:
        ours = rank["optimizers"][name]
        assert ours["kind"] == kinds[name]
        assert ours["resumed"] == ours["curve"][2:]
        tolerance = 3e-2 if "bfloat16" in name else 1e-5
        for step, plain in zip(ours["curve"], ours["torch"], strict=True):
            assert step == pytest.approx(plain, rel=tolerance)


@pytest.mark.parametrize("name", EXPORTS)
def test_exported_adapters_compute_the_same_in_peft(name, results, models, tmp_path):
    model, _ = EXPORTS[name]
    assert export_adapter(read_adapter(models / name / "step_1"), tmp_path / "peft", None) == 14
    plain = reference.in_float64(AutoModelForCausalLM.from_pretrained(models / model))
    with torch.no_grad():
        before = sum(float(reference.loss_sum(plain, {}, batch)) for batch in global_batch())
        adapted = PeftModel.from_pretrained(plain, str(tmp_path / "peft"), autocast_adapter_dtype=False)
        loss = sum(float(reference.loss_sum(adapted, {}, batch)) for batch in global_batch())
    # PEFT keeps factors in the base's dtype; files have the masters, float64 here.
    for rank in results:
        assert rank["exported"][name] == pytest.approx(loss, rel=1e-10)
        assert rank["exported"][name] != pytest.approx(before, rel=1e-2)


def test_an_architecture_that_comes_with_its_weights_is_adapted_alike(results):
    # 8 · (in + out) over q, k, v, o, gate, up, down of two layers
    expected = 2 * 8 * (128 + 96 + 96 + 128 + 160 + 160 + 160)
    assert all(rank["counts"] == {"True": expected, "False": expected} for rank in results)


def test_refuses_on_the_rank_that_cannot_train(results):
    for rank in results:
        assert rank["refusals"]["bfloat16"].startswith("policy.precision: full SFT in bfloat16 needs a GPU")
    assert results[0]["refusals"]["empty stage"] == ""
    assert "no linear of pipeline stage 1 has an adapter" in results[1]["refusals"]["empty stage"]
