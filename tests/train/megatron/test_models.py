# SPDX-License-Identifier: Apache-2.0
"""Pretrained models of each family compute transformers' logits; dropout and checkpoints survive a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lora_suite.blueprint.shape import read_shape
from lora_suite.train.lora.adapter_files import read_adapter
from lora_suite.train.lora.export import export_adapter
from tests.train.megatron import reference
from tests.train.megatron.model_jobs import DROPPED, EXPORTS, INPUT, MODELS, MOE, SPLITS, WAYS, job
from tests.train.megatron.ranks import global_batch, run_ranks, supervised, whole

pytestmark = [pytest.mark.slow, pytest.mark.train]


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
    shape = read_shape(models / name / "config.json")
    joined: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for key, value in rank["parameters"].items():
            parts = [each["parameters"][key] for each in ranks] if rank["tp"] > 1 else [value]
            joined |= reference.whole_tensors(shape, key, rank["first layer"], parts)
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
    for rank in results:
        assert rank["counts"] == {"True": expected, "False": expected, "experts": 7_168}


def test_refuses_on_the_rank_that_cannot_train(results):
    for rank in results:
        assert rank["refusals"]["bfloat16"].startswith("policy.precision: full SFT in bfloat16 needs a GPU")
    assert results[0]["refusals"]["empty stage"] == ""
    assert "no linear of pipeline stage 1 has an adapter" in results[1]["refusals"]["empty stage"]
