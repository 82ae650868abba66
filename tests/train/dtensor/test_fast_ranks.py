# SPDX-License-Identifier: Apache-2.0
"""The fast path on several ranks against the fast path on one: every value, whatever is split over ranks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lora_suite.train.backends.dtensor import fast
from tests.train.dtensor.fast_ranks import MAX_NORM, TP, build, different, train, train_each, train_packed
from tests.train.dtensor.ranks import LORA, TINY, Setting, run_ranks

ARMS = [(LORA,), ()]


def near(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0, f"{name} is zero: nothing is compared"
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=1e-11 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(tmp_path, world, overrides, micro, model=TINY):
    """LoRA and full SFT on several ranks and on one."""
    alone = [Setting(arm, model, "float64") for arm in ARMS]
    (expected,) = run_ranks(1, tmp_path / "one", train_each, alone, 4)
    settings = [Setting((*arm, *overrides), model, "float64", world) for arm in ARMS]
    ranks = run_ranks(world, tmp_path / "ranks", train_each, settings, micro)
    for results in ranks:
        for ours, first, one in zip(results, ranks[0], expected, strict=True):
            assert ours["seen"] == pytest.approx(one["seen"], rel=1e-11)
            assert ours["seen"][1] > 10 * MAX_NORM
            assert ours["trainable"] == one["trainable"]
            near(ours["gradients"], one["gradients"])
            near(ours["values"], one["values"])
            assert different(ours["values"], first["values"]) == []


def model_file(folder, **keys):
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(TINY.read_text()) | keys))
    return path


@pytest.mark.slow
def test_two_tensor_parallel_ranks(tmp_path):
    """qwen2 is llama with biases of queries, keys and values."""
    check(tmp_path, 2, (TP,), micro=4, model=model_file(tmp_path, model_type="qwen2"))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [2, 1])
def test_two_data_parallel_ranks(tmp_path, micro):
    check(tmp_path, 2, (), micro)


@pytest.mark.slow
def test_two_by_two_ranks_with_a_tied_head_and_head_norms(tmp_path):
    """Norms of query and key heads are replicated, but each tensor parallel rank sees its own heads only."""
    path = model_file(tmp_path, model_type="qwen3", tie_word_embeddings=True)
    check(tmp_path, 4, (TP,), micro=1, model=path)


def resume_each(settings):
    """For each setting the last of three steps: straight on, and by another backend from the state before."""
    results = []
    for setting in settings:
        straight, resumed = build(setting), build(setting)
        train(straight, 2, steps=2)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        results.append([train(each, 2, steps=1, first=2) for each in (straight, resumed)])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(TP,), ()], ids=["tp2", "dp2"])
def test_a_resumed_training_goes_on_bit_by_bit(tmp_path, layout):
    settings = [
        Setting((*arm, *layout), precision=precision, world=2)
        for arm in ARMS
        for precision in ("bfloat16", "float32")
    ]
    for results in run_ranks(2, tmp_path / "ranks", resume_each, settings):
        for straight, resumed in results:
            assert straight["seen"] == resumed["seen"]
            assert different(straight["values"], resumed["values"]) == []


PROGRAM = """
import sys
from functools import partial
from pathlib import Path
import torch
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.program import Program
torch.set_num_threads(1)
sys.exit(Program(Path(sys.argv[1]), partial(fast.build, gpu=False)).run())
"""


def run_program(folder, script):
    """The program on two ranks of this machine, by the fast path."""
    script.write_text(PROGRAM)
    root = Path(__file__).resolve().parents[3]
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(script), str(folder)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        cwd=root,
        timeout=120,
        check=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arm", [(), (LORA,)], ids=["full", "lora"])
def test_packs_of_two_ranks_train_as_those_of_one(tmp_path, arm):
    def run(world):
        setting = Setting((*arm, "policy.max_total_sequence_length=64"), precision="float64", world=world)
        return run_ranks(world, tmp_path / str(world), train_packed, setting, 64)

    (one,) = run(1)
    for ours in run(2):
        assert [value for step in ours for value in step] == pytest.approx(
            [value for step in one for value in step], rel=1e-9
        )


@pytest.mark.slow
def test_every_invariant_of_a_tensor_parallel_run_holds(new_run, tmp_path):
    one, two = new_run("one"), new_run("two")
    assert one.train(LORA, backend=partial(fast.build, gpu=False)) == 0
    two.write_job(LORA, TP, "cluster.gpus_per_node=2")
    run_program(two.folder, tmp_path / "rank.py")
    losses = [list(run.metrics["train/loss"].values()) for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)
    assert [each.name for each in two.record.invariants if each.ok is False] == []
    assert {"replicas_equal", "frozen_unchanged"} <= {each.name for each in two.record.invariants if each.ok}
