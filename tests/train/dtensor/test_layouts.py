# SPDX-License-Identifier: Apache-2.0
"""One step in every layout equals the step of a plain model in one process: loss, gradients, norm, update."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lora_suite.train.backends.dtensor.parallel import decoder_layers
from tests.train.dtensor.ranks import (
    LORA,
    TINY,
    Setting,
    one_step,
    reference_step,
    rows,
    run_ranks,
    values_of,
    wake_adapters,
)

CHECKPOINTED = "policy.dtensor_cfg.activation_checkpointing=true"
MAX_NORM = 0.1  # far below the first gradient's norm, so that clipping matters


def tp(size):
    return f"policy.dtensor_cfg.tensor_parallel_size={size}"


def replicas(size):
    return f"policy.dtensor_cfg.dp_replicate_size={size}"


def steps_on_this_rank(settings, micros):
    """For each setting and micro batch size: the first values of the adapters, and one step."""
    results = []
    for setting in settings:
        for micro in micros:
            backend = setting.build()
            factors = None
            if backend.bank is not None:
                wake_adapters(backend)
                factors = values_of(backend)
            results.append((setting, factors, one_step(backend, rows(), micro, MAX_NORM)))
    return results


def check(tmp_path, world, overrides, micros, model=TINY):
    """Run in float64 and float32 and compare every rank's result with the reference."""
    settings = [Setting(tuple(overrides), model, precision, world) for precision in ("float64", "float32")]
    for results in run_ranks(world, tmp_path / "ranks", steps_on_this_rank, settings, micros):
        for setting, factors, step in results:
            expected = reference_step(setting, rows(), MAX_NORM, factors)
            # Adam's update of float32 weights is known to a rounding of the weights, not of the update.
            limits = (1e-10, 1e-10) if setting.precision == "float64" else (1e-5, 1e-3)
            assert step["loss"] == pytest.approx(expected["loss"], rel=limits[0])
            assert step["norm"] == pytest.approx(expected["norm"], rel=limits[0])
            assert expected["norm"] > 10 * MAX_NORM
            for what, limit in zip(("gradients", "updates"), limits, strict=True):
                assert step[what].keys() == expected[what].keys()
                for name, value in expected[what].items():
                    scale = value.abs().max().item()
                    assert scale > 0, f"{what} of {name} are zero: nothing is compared"
                    torch.testing.assert_close(
                        step[what][name], value, rtol=0, atol=limit * scale, msg=lambda m, n=name: f"{n}: {m}"
                    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_any_micro_batch_gives_the_same_step(tmp_path, lora):
    check(tmp_path, 1, lora, micros=(1, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_two_data_parallel_ranks_with_recomputation(tmp_path, lora):
    check(tmp_path, 2, (*lora, CHECKPOINTED), micros=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_two_tensor_parallel_ranks(tmp_path, lora):
    check(tmp_path, 2, (*lora, tp(2)), micros=(2,))


def prefetched(setting):
    """Names of the modules that each sharded layer gathers ahead."""
    model = setting.build().model
    states = {id(each._get_fsdp_state()): name for name, each in model.named_modules() if is_sharded(each)}
    layers = [each for _, each in decoder_layers(model) if is_sharded(each)]
    return [
        [states[id(state)] for state in each._get_fsdp_state()._states_to_forward_prefetch] for each in layers
    ]


def is_sharded(module):
    return isinstance(module, FSDPModule)


@pytest.mark.slow
def test_each_sharded_layer_gathers_the_next_one_ahead(tmp_path):
    for rank in run_ranks(2, tmp_path / "ranks", prefetched, Setting((LORA,), world=2)):
        assert rank == [["model.layers.1"], []]
    for rank in run_ranks(2, tmp_path / "whole", prefetched, Setting((LORA, replicas(2)), world=2)):
        assert rank == []


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_two_by_two_ranks(tmp_path, lora):
    check(tmp_path, 4, (*lora, tp(2)), micros=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_two_replicas_of_two_shards(tmp_path, lora):
    check(tmp_path, 4, (*lora, replicas(2)), micros=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(LORA,), ()], ids=["lora", "full"])
def test_replicas_alone_shard_nothing(tmp_path, lora):
    check(tmp_path, 2, (*lora, replicas(2)), micros=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), (tp(2),), (LORA, tp(2))], ids=["dp2", "tp2", "tp2-lora"])
def test_tied_head_head_norms_and_biases(tmp_path, overrides):
    """Norms of query and key heads are replicated, but each tp rank sees its own heads only."""
    model = json.loads(TINY.read_text())
    model |= {"model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}
    path = tmp_path / "qwen3.json"
    path.write_text(json.dumps(model))
    check(tmp_path, 2, overrides, micros=(2,), model=path)
