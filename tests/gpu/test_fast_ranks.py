# SPDX-License-Identifier: Apache-2.0
"""The fast path of two GPUs, compiled and captured with its collectives, against one GPU or whole experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.dtensor.fast_ranks import MAX_NORM, STEPS, TP, different, train_each, train_packed
from tests.train.dtensor.ranks import LORA, TINY_HYBRID, Setting, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ARMS = {"lora": (LORA,), "full": ()}
LIMITS = {"float32": (1e-4, 1e-2), "bfloat16": (3e-2, 0.2)}
"""Of losses and norms; and of the difference of what is trained, against how far it went in three steps."""
CASES = [(arm, precision) for arm in ARMS for precision in LIMITS]
# Of the size that is usual, so that weights move by more than their last bits.
EPS = "policy.optimizer.kwargs.eps=1e-8"


def settings(world: int, *overrides: str) -> list[Setting]:
    return [Setting((*ARMS[arm], EPS, *overrides), precision=name, world=world) for arm, name in CASES]


def test_any_layout_trains_as_one_gpu_does(tmp_path: Path) -> None:
    def run(name: str, world: int, micro: int, steps: int, *overrides: str) -> list[Any]:
        chosen = settings(world, *overrides)
        return run_ranks(world, tmp_path / name, train_each, chosen, micro, "cuda", steps, backend="nccl")

    (start,) = run("start", 1, 4, 0)
    (one,) = run("one", 1, 4, STEPS)
    for layout, ranks in {"tp": run("tp", 2, 4, STEPS, TP), "dp": run("dp", 2, 2, STEPS)}.items():
        for index, (arm, precision) in enumerate(CASES):
            expected, what = one[index], f"{arm} {precision} {layout}"
            of_scalars, of_values = LIMITS[precision]
            for rank in ranks:
                ours = rank[index]
                assert ours["seen"] == pytest.approx(expected["seen"], rel=of_scalars), what
                assert ours["seen"][1] > 10 * MAX_NORM, what
                assert different(ours["values"], ranks[0][index]["values"]) == [], what
            went = distance(expected["values"], start[index]["values"])
            assert went > 0, what
            assert distance(ranks[0][index]["values"], expected["values"]) < of_values * went, what


@pytest.mark.parametrize("arm", ARMS)
def test_ranks_capture_each_kind_of_pack_together(tmp_path: Path, arm: str) -> None:
    """Packs of rows of up to 512 and up to 2048 tokens; a rank that captured alone would wait forever."""

    def run(world: int) -> list[Any]:
        keys = (*ARMS[arm], EPS, "policy.max_total_sequence_length=2048")
        setting = Setting(keys, precision="bfloat16", world=world)
        return run_ranks(world, tmp_path / str(world), train_packed, setting, 2048, "cuda", backend="nccl")

    (one,) = run(1)
    for ours in run(2):
        for step, expected in zip(ours, one, strict=True):
            assert step == pytest.approx(expected, rel=LIMITS["bfloat16"][0])


EXPERTS = "policy.dtensor_cfg.expert_parallel_size"
HYBRIDS = {
    "lora": (LORA, "policy.dtensor_cfg.lora_cfg.experts=per_expert"),
    "sgd": ("policy.optimizer.name=torch.optim.SGD",),
    "full": (),
}


def test_split_experts_train_as_whole_ones_do(tmp_path: Path) -> None:
    """Whole experts on both GPUs, then half of them on each."""

    def run(name: str, steps: int) -> list[Any]:
        chosen = [
            Setting((*keys, EPS, f"{EXPERTS}={size}"), TINY_HYBRID, "bfloat16", 2)
            for keys in HYBRIDS.values()
            for size in (1, 2)
        ]
        return run_ranks(2, tmp_path / name, train_each, chosen, 2, "cuda", steps, backend="nccl")

    starts, ranks = run("start", 0)[0], run("trained", STEPS)
    of_scalars, of_values = LIMITS["bfloat16"]
    for index, arm in enumerate(HYBRIDS):
        whole, split = ranks[0][2 * index : 2 * index + 2]
        assert split["seen"] == pytest.approx(whole["seen"], rel=of_scalars), arm
        assert different(split["values"], ranks[1][2 * index + 1]["values"]) == [], arm
        went = distance(whole["values"], starts[2 * index]["values"])
        assert 0 < distance(split["values"], whole["values"]) < of_values * went, arm


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Euclidean distance of two sets of tensors."""
    squares = [(left[name].double() - right[name].double()).square().sum() for name in right]
    return torch.stack(squares).sum().sqrt().item()
