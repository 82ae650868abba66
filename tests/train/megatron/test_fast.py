# SPDX-License-Identifier: Apache-2.0
"""The fast path against the plain one: other products and another loss, the same numbers.

Without a GPU nothing is compiled or captured, and the code in between is what is tested here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_suite.blueprint import preflight
from lora_suite.config import load_recipe
from lora_suite.train.backends.base import NO_GPU
from tests.train.megatron.fast_jobs import CASES, FULL_CASES, job
from tests.train.megatron.model_jobs import MODELS
from tests.train.megatron.ranks import FULL, LORA, layout, run_ranks

PADDED = "data.pad_to_max_length=true"
LORA_BLOCK = "policy.megatron_cfg.lora_cfg"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    for name in ("llama", "qwen2", "qwen3"):
        model = MODELS[name]()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder / name)
    return run_ranks(job, tmp_path_factory.mktemp("ranks"), folder)


@pytest.mark.slow
@pytest.mark.train
class TestAgainstThePlainPath:
    @pytest.mark.parametrize("name", [*CASES, *FULL_CASES])
    def test_losses_norms_and_counts_agree(self, name, results):
        for rank in results:
            plain, fast = rank[name]
            for theirs, ours in zip(plain["curve"], fast["curve"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-11)
            assert fast["count"] == plain["count"]
            for what in plain.keys() & {"before", "off", "packed"}:
                assert fast[what] == pytest.approx(plain[what], rel=1e-11)
        curve = results[0][name][1]["curve"]
        assert curve[2][0] < curve[0][0]

    @pytest.mark.parametrize("name", [*CASES, *FULL_CASES])
    def test_every_gradient_and_value_agrees(self, name, results):
        for rank in results:
            plain, fast = rank[name]
            for what in plain.keys() & {"gradients", "last"}:
                assert fast[what].keys() == plain[what].keys()
                for key, value in plain[what].items():
                    tolerance = 1e-10 * float(value.abs().max())
                    torch.testing.assert_close(fast[what][key], value, rtol=0, atol=tolerance)

    @pytest.mark.parametrize("what", ["lora", "full"])
    def test_a_state_comes_back(self, what, results):
        for rank in results:
            steps = rank["resumed"][what]
            assert steps[2:] == steps[:2]
            assert steps[1] != steps[0]

    def test_the_other_path_s_state_of_full_training_is_refused(self, results):
        for rank in results:
            plain, fast = rank["resumed"]["refused"]
            assert "policy.megatron_cfg.fast_path" in plain
            assert "path through it" in fast

    def test_invariants_hold(self, results):
        for rank in results:
            said = rank["checked"]["invariants"]
            assert [(name, message) for name, (ok, message) in said.items() if ok is False] == []
            for name in ("frozen_unchanged", "replicas_equal", "adapter_formula"):
                assert said[name][0] is True

    def test_linears_add_what_the_formula_says_and_a_scale_applied_twice_is_seen(self, results):
        for rank in results:
            # q, k, v, o, gate, up, down of both layers.
            assert list(rank["checked"]["found"].values()) == pytest.approx([1.0] * 14, rel=1e-9)
            assert list(rank["checked"]["doubled"].values()) == pytest.approx([2.0] * 14, rel=1e-9)

    def test_the_fingerprint_sees_a_frozen_weight_inside_its_frame(self, results):
        assert all(rank["checked"]["sees a weight in its frame"] for rank in results)


@pytest.mark.slow
@pytest.mark.train
def test_the_program_trains_alike_and_every_invariant_holds(new_run):
    from megatron.core import parallel_state

    from lora_suite.train.backends.megatron.construct import build_backend

    arm = (
        "policy.dtensor_cfg.enabled=false",
        "policy.megatron_cfg.enabled=true",
        f"{LORA_BLOCK}.enabled=true",
    )
    losses = []
    for name, fast in (("plain", False), ("fast", True)):
        run = new_run(name)
        assert run.train(*arm, "policy.precision=float64", backend=partial(build_backend, fast=fast)) == 0
        parallel_state.destroy_model_parallel()
        assert [each.name for each in run.record.invariants if each.ok is False] == []
        assert run.record.fast_path.taken is fast
        losses.append(list(run.metrics["train/loss"].values()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)


def refused(recipe: Path, *overrides: str) -> str | None:
    from lora_suite.train.backends.megatron.fast.build import refusal

    resolved = load_recipe(recipe, overrides)
    return refusal(resolved.recipe, preflight(resolved.recipe, resolved.path))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (layout(tensor_model_parallel_size=1, pipeline_model_parallel_size=2), "pipeline"),
        (layout(sequence_parallel="true"), "sequence_parallel"),
        (layout(activation_checkpointing="true"), "activation_checkpointing"),
        (("data.pad_to_max_length=false",), "pad_to_max_length"),
        ((f"{LORA_BLOCK}.dropout=0.1",), "dropout"),
        ((f"{LORA_BLOCK}.lora_dtype=float64",), "lora_dtype"),
        ((f"{LORA_BLOCK}.target_modules=[lm_head,q_proj]",), "head"),
        (
            ("policy.model_name=models/tiny-qwen3-moe.json", *layout(tensor_model_parallel_size=1)),
            "routed experts",
        ),
    ],
)
def test_what_it_cannot_do_is_named(overrides, reason):
    assert reason in str(refused(LORA, PADDED, *overrides))


def test_what_it_can_do_is_not_refused():
    assert refused(LORA, PADDED) is None
    assert refused(FULL, PADDED) is None
    assert refused(LORA, "policy.sequence_packing.enabled=true") is None
    alone = layout(tensor_model_parallel_size=1)
    for rows in (PADDED, "policy.sequence_packing.enabled=true"):
        assert refused(FULL, rows, *alone) is None


def test_it_is_left_alone_where_it_is_off_or_there_is_no_gpu():
    from lora_suite.train.backends.megatron.fast.build import slow_path_reason

    for device, word, said in (
        ("cpu", "auto", NO_GPU),
        ("cuda", "off", "policy.megatron_cfg.fast_path is off"),
        ("cuda", "auto", None),
    ):
        resolved = load_recipe(LORA, (PADDED, *layout(fast_path=word)))
        blueprint = preflight(resolved.recipe, resolved.path)
        assert slow_path_reason(resolved.recipe, blueprint, torch.device(device)) == said
