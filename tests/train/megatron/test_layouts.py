# SPDX-License-Identifier: Apache-2.0
"""Every parallel layout trains as transformers and plain torch do on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from lora_suite.train.backends.megatron.weights import ShardMap
from lora_suite.train.topology import Axis
from tests.train.megatron import reference
from tests.train.megatron.ranks import (
    FULL_STEPS,
    LAYOUTS,
    global_batch,
    layout,
    micro_batches_in_half,
    replicas_without_a_sum,
    run_ranks,
    supervised,
    train_adapters,
    train_weights,
    whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.train]

FUSED = {
    f"{name} fused": (*LAYOUTS[name], *layout(**{"lora_cfg.fused": "true"})) for name in ("tp2 sp", "dp2")
}
# Adapters of row-parallel linears by the all-to-all: another way to the same numbers.
EXCHANGED = {
    f"{name} a2a": (*LAYOUTS[name], *layout(**{"lora_cfg.a2a_experimental": "true"}))
    for name in ("tp2 sp", "tp2 sp recompute")
}
SOME = {"tp2 some": layout(**{"lora_cfg.target_modules": "[q_proj,v_proj,up_proj,lm_head]"})}
ADAPTED = {**LAYOUTS, **FUSED, **EXCHANGED, **SOME}

Results = list[dict[str, dict[str, Any]]]


def job() -> dict[str, dict[str, Any]]:
    """Both kinds of training in one start of the processes."""
    return {
        "lora": train_adapters(ADAPTED),
        "full": train_weights(LAYOUTS),
        "sums": replicas_without_a_sum(),
        "half": micro_batches_in_half(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(job, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return reference.tiny_llama()


@pytest.fixture(scope="module")
def base(model):
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def references(model, base, results):
    """Trainings of the reference: of all weights, and of the adapters that each layout began with."""
    trainings = {"full": reference.train(model, base, lambda leaves: leaves, FULL_STEPS)}
    for kind, name in (("canonical", "dp2"), ("fused", "dp2 fused"), ("some", "tp2 some")):
        merge = reference.merged_fused if kind == "fused" else reference.merged
        first = whole([rank["lora"][name] for rank in results], "first")
        trainings[kind] = reference.train(model, first, lambda leaves, merge=merge: merge(base, leaves))
    return trainings


def kind_of(name: str) -> str:
    return "fused" if "fused" in name else "some" if "some" in name else "canonical"


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float) -> None:
    """Equal within `relative` times each tensor's largest value."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        tolerance = relative * float(value.abs().max())
        torch.testing.assert_close(ours[key], value, rtol=0, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ADAPTED)
class TestAdapters:
    def test_loss_and_gradient_norm_follow_the_reference(self, name, results, references):
        for rank in results:
            for ours, theirs in zip(
                rank["lora"][name]["curve"], references[kind_of(name)]["curve"], strict=True
            ):
                assert ours == pytest.approx(theirs, rel=1e-11)

    def test_every_gradient_and_update_is_the_reference_s(self, name, results, references):
        ranks = [rank["lora"][name] for rank in results]
        for what, relative in (("gradients", 1e-10), ("updated", 1e-10), ("last", 1e-10)):
            assert_close(whole(ranks, what), references[kind_of(name)][what], relative)

    def test_replicas_stay_equal_to_the_last_bit(self, name, results):
        first, second = (rank["lora"][name] for rank in results)
        shared = first["replicated"] if first["tp"][1] > 1 else first["last"].keys() & second["last"].keys()
        for key in shared:
            assert torch.equal(first["last"][key], second["last"][key])

    def test_first_values_do_not_depend_on_the_layout(self, name, results):
        alike = {"canonical": "dp2", "fused": "dp2 fused", "some": "tp2 some"}[kind_of(name)]
        theirs = whole([rank["lora"][alike] for rank in results], "first")
        for key, value in whole([rank["lora"][name] for rank in results], "first").items():
            assert torch.equal(value, theirs[key])

    def test_counts_and_frozen_weights(self, name, results):
        expected = {
            "canonical": 16_384,  # 2 · 8 · (128 + 96 + 96 + 128 + 192 + 192 + 192): q, k, v, o, gate, up, …
            "fused": 13_312,  # 2 · 8 · (192 + 128 + 320 + 192): qkv, proj, fc1, fc2
            "some": 9_728,  # 2 · 8 · (128 + 96 + 192) + 8 · (64 + 320): q, v, up; head
        }[kind_of(name)]
        for rank in results:
            assert rank["lora"][name]["count"] == expected
            assert rank["lora"][name]["frozen equal"]

    def test_evaluates_like_merged_weights_and_without_adapters_like_the_base(
        self, name, results, model, base
    ):
        ranks = [rank["lora"][name] for rank in results]
        merge = reference.merged_fused if "fused" in name else reference.merged
        weights = {"before": merge(base, whole(ranks, "first")), "off": base}
        with torch.no_grad():
            for what, values in weights.items():
                expected = sum(reference.loss_sum(model, values, batch) for batch in global_batch())
                assert ranks[0][what] == pytest.approx(float(expected), rel=1e-11)


@pytest.mark.parametrize("name", LAYOUTS)
class TestAllWeights:
    def test_loss_and_gradient_norm_follow_the_reference(self, name, results, references):
        for rank in results:
            for ours, theirs in zip(rank["full"][name]["curve"], references["full"]["curve"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-11)

    def test_trained_weights_are_the_reference_s(self, name, results, references):
        for rank in results:
            ours = rank["full"][name]
            shards = ShardMap(reference.shape(), Axis(*ours["tp"]))
            last = references["full"]["last"]
            theirs = {
                key: shards.local(key, ours["first layer"], last.__getitem__) for key in ours["weights"]
            }
            assert_close(ours["weights"], theirs, 1e-10)

    def test_validation_and_counts(self, name, results, references, model):
        with torch.no_grad():
            last = references["full"]["last"]
            expected = float(sum(reference.loss_sum(model, last, batch) for batch in global_batch()))
        for rank in results:
            assert rank["full"][name]["validation"] == pytest.approx(expected, rel=1e-11)
            assert rank["full"][name]["count"] == sum(p.numel() for p in model.parameters())

    def test_linears_are_megatron_core_s_own(self, name, results):
        classes = results[0]["full"][name]["classes"]
        last_names = {path.rpartition(".")[2]: kind for path, kind in classes.items()}
        assert last_names["linear_qkv"] is last_names["linear_fc1"] is ColumnParallelLinear
        assert last_names["linear_proj"] is last_names["linear_fc2"] is RowParallelLinear
        assert last_names["word_embeddings"] is VocabParallelEmbedding
        assert not any("adapter" in path for path in classes)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("none", "equal"), ("tp", "tensor parallel ranks of pp 0"), ("dp", "data parallel ranks of tp 0, pp 0")],
)
def test_a_missing_sum_of_gradients_is_seen_where_replicas_drift_apart(missing, said, results):
    # https://github.com/modelscope/mcore-bridge/pull/173: ranks drifted apart, and the export kept one's.
    for rank in results:
        ok, message = rank["sums"][missing]["replicas_equal"]
        assert ok is (missing == "none")
        assert said in message


@pytest.mark.parametrize("name", ["tp2", "pp2", "pp2 recompute"])
def test_bfloat16_gradients_of_micro_batches_add_up_in_float32(name, results):
    # https://github.com/radixark/miles/pull/1721; the exact sum of what each micro batch gave, in float64.
    for rank in results:
        together, *each = rank["half"][name]
        assert len(each) == 4
        assert together.dtype == torch.float32
        exact = sum(gradient.double() for gradient in each)
        torch.testing.assert_close(together.double(), exact, rtol=1e-6, atol=1e-7 * float(exact.abs().max()))
        assert not torch.equal(together, together.bfloat16().float())


def test_the_loss_falls(results):
    assert supervised(global_batch()) > 0
    for kind in ("lora", "full"):
        curve = [loss for loss, _ in results[0][kind]["tp2"]["curve"]]
        assert curve == sorted(curve, reverse=True)
        assert curve[-1] < 0.95 * curve[0]
