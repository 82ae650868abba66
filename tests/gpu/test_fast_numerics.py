# SPDX-License-Identifier: Apache-2.0
"""The fast path in bfloat16 against the eager one: no further from float64, and the same curve of losses."""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lora_suite.blueprint.preflight import preflight
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.build import build as build_eager
from lora_suite.train.batch import MicroBatch
from tests.train.dtensor.ranks import LORA, RECIPES, TINY, Setting, awake

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "initializer_range": 0.02,
}
LENGTH, ROWS, STEPS, LR = 256, 4, 20, 1e-3


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # Layers of every test are one code to the compiler, which gives up after eight kinds of it.
    torch._dynamo.reset()


def setting(folder: Path, precision: str, rank: int, *more: str) -> Setting:
    model = folder / "model.json"
    model.write_text(json.dumps(json.loads(TINY.read_text()) | SHAPE))
    overrides = (
        LORA,
        f"policy.dtensor_cfg.lora_cfg.dim={rank}",
        "data.pad_to_max_length=true",
        f"policy.max_total_sequence_length={LENGTH}",
        "policy.optimizer.kwargs.eps=1e-8",
        *more,
    )
    return Setting(overrides, model, precision)


def build(which: str, made: Setting) -> Any:
    """A backend whose weights and factors, whatever its precision, are bfloat16 numbers; B is not zero."""
    path, device = RECIPES / "sft.yaml", torch.device("cuda", 0)
    blueprint = preflight(made.recipe, path)
    if which == "fast":
        backend = fast.build(made.recipe, path, blueprint, device, gpu=True)
    else:
        backend = build_eager(made.recipe, path, blueprint, device)
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.copy_(parameter.bfloat16())
    bank = backend.bank
    for slot in bank.slots:
        if slot.factor == "b":
            bank.master[slot.start : slot.stop] = awake(slot.key, slot.adapter.full_shape("b")).flatten() / 10
    bank.master.copy_(bank.master.bfloat16())
    bank.publish()
    return backend


def batch(seed: int) -> MicroBatch:
    """Rows that can be learnt: each token is the one before plus the row's number."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, SHAPE["vocab_size"], (ROWS, 1), generator=generator)
    ids = (start + torch.arange(LENGTH + 1)[None] * (torch.arange(ROWS)[:, None] + 1)) % SHAPE["vocab_size"]
    return MicroBatch(ids[:, :-1].contiguous().cuda(), ids[:, 1:].contiguous().cuda())


def gradients(backend: Any) -> dict[str, torch.Tensor]:
    """Of every factor, from one step."""
    backend.forward_backward([batch(0)], ROWS * LENGTH)
    backend.sync_gradients()
    bank = backend.bank
    return {slot.key: bank.master_gradient[slot.start : slot.stop].double() for slot in bank.slots}


@pytest.mark.parametrize("rank", [8, 128])
def test_gradients_are_as_close_to_float64_as_the_eager_path(tmp_path: Path, alone: None, rank: int) -> None:
    exact = gradients(build("eager", setting(tmp_path, "float64", rank)))
    eager = gradients(build("eager", setting(tmp_path, "bfloat16", rank)))
    quick = gradients(build("fast", setting(tmp_path, "bfloat16", rank)))
    assert exact.keys() == eager.keys() == quick.keys()
    ratios = {
        key: float((quick[key] - true).norm() / (eager[key] - true).norm()) for key, true in exact.items()
    }
    whole = [torch.cat(list(each.values())) for each in (exact, eager, quick)]
    error = [float((each - whole[0]).norm() / whole[0].norm()) for each in whole[1:]]
    print(f"rank {rank}: eager {error[0]:.2e}, fast {error[1]:.2e}, largest ratio {max(ratios.values()):.2f}")
    assert 0.0 < error[1] < 2 * error[0] < 0.2
    assert {key: ratio for key, ratio in ratios.items() if ratio > 2.0} == {}


def peak_of_a_pass(backend: Any) -> int:
    """Bytes that forward and backward pass of one micro batch need beside what is there before.

    Of the second pass outside a graph: in the first one libraries allocate their workspaces.
    """
    for _ in range(2):
        # A compiled backend is a cycle: an older one that goes meanwhile would be counted as saved.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backend._compute(None, *batch(0).tensors)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("rank", [8, 128])
def test_recomputation_in_part_gives_the_same_gradients_for_less(
    tmp_path: Path, alone: None, rank: int
) -> None:
    found, peaks = [], []
    for which, layers in (("false", 0), ("selective", 0), ("selective", 3)):
        keys = f"activation_checkpointing={which}", f"recompute_mlp_layers={layers}"
        more = [f"policy.dtensor_cfg.{key}" for key in keys]
        backend = build("fast", setting(tmp_path, "bfloat16", rank, *more))
        found.append(torch.cat(list(gradients(backend).values())))
        peaks.append(peak_of_a_pass(backend))
        del backend
    # Sums of atomic additions in attention's gradient vary from run to run.
    for mine in found[1:]:
        assert float((mine - found[0]).norm() / found[0].norm()) < 1e-3
    norms = 2 * SHAPE["num_hidden_layers"] - 1  # nothing trains before the first
    saved = 2 * ROWS * LENGTH * (norms * SHAPE["hidden_size"] + 4 * SHAPE["intermediate_size"])
    products = 2 * ROWS * LENGTH * 3 * 2 * SHAPE["intermediate_size"]
    less = peaks[0] - peaks[1], peaks[1] - peaks[2]
    print(f"rank {rank}: peaks {peaks}, less by {less}, counted {saved} and {products}")
    assert less[0] > 0.8 * saved
    assert less[1] > 0.8 * products


def curve(backend: Any, order: list[int], micro: int) -> list[float]:
    """Losses of some steps; order of a batch's rows, and rows in a micro batch."""
    losses = []
    for step in range(STEPS):
        rows = batch(step)
        parts = [
            MicroBatch(rows.input_ids[part].contiguous(), rows.labels[part].contiguous())
            for part in torch.tensor(order, device="cuda").split(micro)
        ]
        losses.append(float(backend.forward_backward(parts, ROWS * LENGTH)) / (ROWS * LENGTH))
        backend.sync_gradients()
        backend.clip_gradients(1.0)
        backend.optimizer_step(LR)
    return losses


def distance(mine: list[float], other: list[float]) -> float:
    """Root of the mean square of what two curves differ by."""
    return math.sqrt(statistics.fmean((one - two) ** 2 for one, two in zip(mine, other, strict=True)))


def test_losses_of_20_steps_stay_within_the_eager_path_s_own_rounding(tmp_path: Path, alone: None) -> None:
    """Rows in another order, or in other micro batches, are the same training but for the order of sums.

    Such runs of the eager path round alike in most places, so that they are nearer to one another than any of
    them is to float64; the fast path must be within twice either distance.
    """
    orders = (([0, 1, 2, 3], 4), ([3, 1, 0, 2], 4), ([0, 1, 2, 3], 2), ([2, 3, 0, 1], 1))
    exact = curve(build("eager", setting(tmp_path, "float64", 8)), *orders[0])
    made = setting(tmp_path, "bfloat16", 8)
    eager = [curve(build("eager", made), *order) for order in orders]
    quick = curve(build("fast", made), *orders[0])
    spread = max(distance(one, eager[0]) for one in eager[1:])
    apart = [distance(one, exact) for one in (*eager, quick)]
    last = max(each[-1] for each in eager) - min(each[-1] for each in eager)
    gap = distance(quick, eager[0])
    print(
        f"loss {quick[0]:.4f} to {quick[-1]:.4f}; from float64: eager {min(apart[:-1]):.1e} to "
        f"{max(apart[:-1]):.1e}, fast {apart[-1]:.1e}; from eager: its other orders up to {spread:.1e}, "
        f"fast {gap:.1e}; "
        f"after {STEPS} steps {last:.1e}, fast from eager {abs(quick[-1] - eager[0][-1]):.1e}"
    )
    assert quick[-1] < quick[0] - 0.02
    assert 0.0 < spread < max(apart[:-1]) < 1e-3
    assert apart[-1] <= 2 * max(apart[:-1])
    assert gap <= 2 * spread
