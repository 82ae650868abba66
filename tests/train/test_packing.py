# SPDX-License-Identifier: Apache-2.0
"""Micro batches of 1, 2, 4 rows and packed rows make one and the same step, on every layout of two ranks.

And that step's loss is the one of an independent forward: transformers' model, row by row, torch's
cross-entropy (https://github.com/hiyouga/LlamaFactory/issues/8277 saw three times the loss when packed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from lora_suite.blueprint import preflight
from lora_suite.config import load_recipe
from lora_suite.train.batch import IGNORED
from lora_suite.train.data.examples import Example
from lora_suite.train.data.load import load_data
from lora_suite.train.program import build_backend
from tests.train.megatron import reference
from tests.train.megatron.ranks import FULL, LORA, RECIPES, layout, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.train]

CASES = {
    "dtensor full dp2": (RECIPES / "sft-tiny-llama-1n2c-fsdp2.yaml", ()),
    "dtensor lora tp2": (RECIPES / "sft-tiny-llama-1n2c-fsdp2tp2-lora.yaml", ()),
    "dtensor lora dp2 recompute": (
        RECIPES / "sft-tiny-llama-1n2c-fsdp2-lora.yaml",
        ("policy.dtensor_cfg.activation_checkpointing=true",),
    ),
    "megatron full dp2": (FULL, layout(tensor_model_parallel_size=1)),
    "megatron lora tp2 sp": (LORA, layout(sequence_parallel="true", activation_checkpointing="true")),
    "megatron lora pp2": (LORA, layout(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)),
}
WAYS = {
    "rows 1": (1, "false"),
    "rows 2": (2, "false"),
    "rows 4": (4, "false"),
    "packed 1": (1, "true"),
    "packed 2": (2, "true"),
    # A micro batch without anything to learn counts nothing, and makes no NaN.
    "rows 2, and empty ones": (2, "false"),
}
SMALL = ("policy.precision=float64", "sft.max_num_steps=1", "sft.val_period=0", "sft.val_at_end=false")


def steps() -> dict[str, dict[str, dict[str, Any]]]:
    """For each case and way of cutting: loss in training and in evaluation, norm, slots, fingerprint."""
    from megatron.core import parallel_state

    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (path, overrides) in CASES.items():
        parallel_state.destroy_model_parallel()
        recipe = load_recipe(path, (*SMALL, *overrides)).recipe
        backend = build_backend(recipe, path, preflight(recipe, path), torch.device("cpu"))
        dp, results[name] = backend.topology.dp, {}
        for way, (micro, packed) in WAYS.items():
            cut = (f"policy.train_micro_batch_size={micro}", f"policy.sequence_packing.enabled={packed}")
            data = load_data(load_recipe(path, (*SMALL, *overrides, *cut)).recipe, path)
            (batch,) = data.steps
            batches = data.slicing.micro_batches(batch, dp)
            if way.endswith("empty ones"):
                nothing = torch.full_like(batches[0].labels, IGNORED)
                batches = [replace(batches[0], labels=nothing), *batches, replace(batches[1], labels=nothing)]
            loss = dp.sum(backend.forward_backward(batches, batch.supervised))
            backend.sync_gradients()
            norm = backend.clip_gradients(None)
            backend.optimizer_step(0.0)
            evaluated = dp.sum(backend.evaluate(batches))
            results[name][way] = {
                "loss": float(loss) / batch.supervised,
                "norm": float(norm),
                "evaluated": float(evaluated) / batch.supervised,
                "slots": data.slicing.slots(batch, dp.size),
                "fingerprint": batch.fingerprint,
            }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, dict[str, Any]]]]:
    """What each rank saw."""
    return run_ranks(steps, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def independent() -> float:
    """The mean loss of the recipe's first batch, each row by itself, without padding."""
    path = CASES["dtensor full dp2"][0]
    recipe = load_recipe(path, SMALL).recipe
    examples: Sequence[Example] = load_data(recipe, path).steps[0].examples
    model, total, tokens = reference.tiny_llama(), 0.0, 0
    for example in examples:
        ids = torch.from_numpy(example.tokens.astype("int64"))
        targets = ids[1:].masked_fill(~torch.from_numpy(example.learnt[1:]), IGNORED)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()
        tokens += int((targets != IGNORED).sum())
    return total / tokens


@pytest.mark.parametrize("case", CASES)
def test_every_way_of_cutting_makes_the_same_step(results, independent, case) -> None:
    # Megatron's token losses are float32, transformers' norms compute in it.
    limit = 1e-6
    for rank in results:
        first = rank[case]["rows 1"]
        assert first["norm"] > 0
        for way, found in rank[case].items():
            assert found["loss"] == pytest.approx(independent, rel=limit), way
            assert found["evaluated"] == pytest.approx(independent, rel=limit), way
            assert found["norm"] == pytest.approx(first["norm"], rel=limit), way
            assert found["fingerprint"] == first["fingerprint"], way


def test_packing_saves_slots(results) -> None:
    found = results[0]["dtensor full dp2"]
    # Every way but packing gives each of 16 rows 64 slots.
    assert {found[way]["slots"] for way in ("rows 1", "rows 2", "rows 4")} == {16 * 64}
    assert found["packed 1"]["slots"] <= 16 * 64 / 2
    assert found["packed 1"]["slots"] % (2 * 64) == 0
