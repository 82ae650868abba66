# SPDX-License-Identifier: Apache-2.0
"""The fast path with experts split over ranks against the same with all experts on each of them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from lora_suite.train.backends.dtensor import fast
from tests.train.dtensor.fast_ranks import MAX_NORM, build, different, train, train_each
from tests.train.dtensor.ranks import LORA, TINY_HYBRID, Setting, run_ranks
from tests.train.dtensor.test_fast import PADDED, refusal
from tests.train.dtensor.test_fast_ranks import run_program

PER_EXPERT = "policy.dtensor_cfg.lora_cfg.experts=per_expert"
SGD = "policy.optimizer.name=torch.optim.SGD"
PACKED = "policy.sequence_packing.enabled=true"


def hybrid(*overrides, ep, world=2, precision="float64"):
    keys = (*overrides, f"policy.dtensor_cfg.expert_parallel_size={ep}")
    return Setting(keys, TINY_HYBRID, precision, world)


ARMS = {"lora": (LORA, PER_EXPERT), "adamw": (), "sgd": (SGD,), "lora-sgd": (LORA, SGD)}
"""Of the last experts are frozen and have no adapters."""


def assert_equal(split, whole, first):
    assert split["seen"] == pytest.approx(whole["seen"], rel=1e-10)
    assert split["seen"][1] > 10 * MAX_NORM
    assert split["trainable"] == whole["trainable"]
    for what in ("gradients", "values"):
        assert split[what].keys() == whole[what].keys()
        for name, value in whole[what].items():
            # The correction of a router's scores is zero; it does not train.
            scale = value.abs().max().item()
            assert scale > 0.0 or name.endswith("e_score_correction_bias"), name
            torch.testing.assert_close(
                split[what][name], value, rtol=0.0, atol=1e-10 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert different(split["values"], first["values"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_two_ranks_split_the_experts(tmp_path, arm):
    """Two micro batches a step; three steps."""
    settings = [hybrid(*arm, ep=1), hybrid(*arm, ep=2)]
    ranks = run_ranks(2, tmp_path / "ranks", train_each, settings, 1)
    for whole, split in ranks:
        assert_equal(split, whole, ranks[0][1])


@pytest.mark.slow
def test_pairs_of_four_ranks_split_them_and_share_their_update(tmp_path):
    settings = [hybrid(*ARMS[arm], ep=ep, world=4) for arm in ("lora", "adamw") for ep in (1, 2)]
    ranks = run_ranks(4, tmp_path / "ranks", train_each, settings, 1)
    for results in ranks:
        for index in (0, 2):
            assert_equal(results[index + 1], results[index], ranks[0][index + 1])


def written_and_compiled(settings):
    """Two steps of each, as written, and with every layer compiled into one graph."""
    results = []
    for setting in settings:
        written, compiled = build(setting), build(setting)
        for layer in compiled.model.layers:
            layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        results.append([train(each, 1, steps=2) for each in (written, compiled)])
    return results


@pytest.mark.slow
def test_its_layers_compile_in_one_graph(tmp_path):
    settings = [hybrid(*ARMS[arm], ep=2) for arm in ("lora", "sgd")]
    for written, compiled in run_ranks(2, tmp_path / "ranks", written_and_compiled, settings)[0]:
        assert compiled["seen"] == pytest.approx(written["seen"], rel=1e-12)


def resume(settings):
    """The last of three steps: straight on, and by another backend from the state before."""
    results = []
    for setting in settings:
        straight, resumed = build(setting), build(setting)
        train(straight, 2, steps=2)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        results.append([train(each, 2, steps=1, first=2) for each in (straight, resumed)])
    return results


@pytest.mark.slow
def test_a_resumed_training_goes_on_bit_by_bit(tmp_path):
    settings = [hybrid(*ARMS[arm], ep=2, precision="bfloat16") for arm in ("lora", "sgd", "adamw")]
    for results in run_ranks(2, tmp_path / "ranks", resume, settings):
        for straight, resumed in results:
            assert straight["seen"] == resumed["seen"]
            assert different(straight["values"], resumed["values"]) == []


@pytest.mark.slow
def test_every_invariant_of_a_run_with_split_experts_holds(new_run, tmp_path):
    one, two = new_run("one"), new_run("two")
    keys = (*ARMS["lora"], f"policy.model_name={TINY_HYBRID}", "policy.train_micro_batch_size=1")
    assert one.train(*keys, backend=partial(fast.build, gpu=False)) == 0
    two.write_job(*keys, "cluster.gpus_per_node=2", "policy.dtensor_cfg.expert_parallel_size=2")
    run_program(two.folder, tmp_path / "rank.py")
    losses = [list(run.metrics["train/loss"].values()) for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert [each.name for each in two.record.invariants if each.ok is False] == []
    assert {"replicas_equal", "frozen_unchanged"} <= {each.name for each in two.record.invariants if each.ok}


@pytest.mark.slow
def test_packed_rows_go_to_experts_of_other_ranks(new_run, tmp_path):
    keys = (*ARMS["lora"], PACKED, f"policy.model_name={TINY_HYBRID}", "policy.train_global_batch_size=16")
    one, two = new_run("one"), new_run("two")
    assert one.train(*keys, backend=partial(fast.build, gpu=False)) == 0
    two.write_job(*keys, "cluster.gpus_per_node=2", "policy.dtensor_cfg.expert_parallel_size=2")
    run_program(two.folder, tmp_path / "rank.py")
    losses = [list(run.metrics["train/loss"].values()) for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_it_is_not_refused(monkeypatch):
    monkeypatch.setattr("lora_suite.train.backends.dtensor.fast.hybrid_build.find_spec", lambda _: object())
    for arm in ARMS.values():
        for rows in (PADDED, PACKED):
            assert refusal(hybrid(*arm, rows, ep=2, precision="bfloat16"), memory=2**40) is None
