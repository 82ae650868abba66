# SPDX-License-Identifier: Apache-2.0
"""A hybrid model (Mamba, experts, attention) on the plain path.

Its step is that of a plain transformers model, however experts are laid out over ranks, and there are
adapters wherever something is multiplied.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_suite.blueprint.preflight import preflight
from lora_suite.train.batch import MicroBatch, Segments
from tests.train.dtensor.ranks import (
    LORA,
    RECIPES,
    TINY_HYBRID,
    Setting,
    one_step,
    reference_step,
    rows,
    run_ranks,
    values_of,
    wake_adapters,
)

MAX_NORM = 0.1
PER_EXPERT = "policy.dtensor_cfg.lora_cfg.experts=per_expert"
SHARED = "policy.dtensor_cfg.lora_cfg.experts=shared"
Result = tuple[dict[str, torch.Tensor] | None, dict[str, Any]]


def ep(size: int) -> str:
    return f"policy.dtensor_cfg.expert_parallel_size={size}"


def replicas(size: int) -> str:
    return f"policy.dtensor_cfg.dp_replicate_size={size}"


def hybrid(*overrides: str, world: int = 2, precision: str = "float64") -> Setting:
    return Setting(overrides, TINY_HYBRID, precision, world)


def steps_on_this_rank(settings: list[Setting]) -> list[Result]:
    """For each setting the first values of the adapters, and one step of two micro batches of one row."""
    results: list[Result] = []
    for setting in settings:
        backend = setting.build()
        factors = None
        if backend.bank is not None:
            wake_adapters(backend)
            factors = values_of(backend)
        results.append((factors, one_step(backend, rows(), 1, MAX_NORM)))
    return results


def assert_same(step: dict[str, Any], expected: dict[str, Any], limit: float, update_limit: float) -> None:
    assert step["loss"] == pytest.approx(expected["loss"], rel=limit)
    assert step["norm"] == pytest.approx(expected["norm"], rel=limit)
    assert expected["norm"] > 10 * MAX_NORM
    for what, bound in (("gradients", limit), ("updates", update_limit)):
        assert step[what].keys() == expected[what].keys()
        for name, value in expected[what].items():
            scale = value.abs().max().item()
            assert scale > 0, f"{what} of {name} are zero: nothing is compared"
            torch.testing.assert_close(
                step[what][name], value, rtol=0, atol=bound * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "trains", [(), (LORA, PER_EXPERT), (LORA, SHARED)], ids=["full", "per_expert", "shared"]
)
def test_split_experts_train_like_whole_ones(tmp_path, trains):
    """In float64, two ranks: experts on all ranks, split, and split beside weights that are not sharded."""
    settings = [
        hybrid(*trains, ep(1)),
        hybrid(*trains, ep(2)),
        hybrid(*trains, ep(2), replicas(2)),
    ]
    for whole, *split in run_ranks(2, tmp_path / "ranks", steps_on_this_rank, settings):
        for _, step in split:
            assert_same(step, whole[1], 1e-10, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("trains", [(), (LORA, PER_EXPERT)], ids=["full", "lora"])
def test_the_step_is_that_of_a_plain_transformers_model(tmp_path, trains):
    """In float32, because transformers' experts know no float64; an update shows the rounding of weights."""
    setting = hybrid(*trains, ep(2), precision="float32")
    for ((factors, step),) in run_ranks(2, tmp_path / "ranks", steps_on_this_rank, [setting]):
        assert_same(step, reference_step(setting, rows(), MAX_NORM, factors), 1e-5, 1e-3)


@pytest.mark.slow
def test_experts_are_split_over_pairs_of_four_ranks(tmp_path):
    settings = [hybrid(LORA, PER_EXPERT, ep(1), world=4), hybrid(LORA, PER_EXPERT, ep(2), world=4)]
    settings += [hybrid(ep(1), world=4), hybrid(ep(2), world=4)]
    for lora, lora_split, full, full_split in run_ranks(4, tmp_path / "ranks", steps_on_this_rank, settings):
        assert_same(lora_split[1], lora[1], 1e-10, 1e-10)
        assert_same(full_split[1], full[1], 1e-10, 1e-10)


def counts_on_this_rank(settings: list[Setting]) -> list[tuple[int, int, int, list[str]]]:
    results = []
    for setting in settings:
        backend = setting.build()
        bank = backend.bank
        backend.forward_backward([rows()], 1)
        silent = []
        if bank is not None:
            largest = bank.largest(bank.gradient).tolist()
            silent = [s.key for s, v in zip(bank.slots, largest, strict=True) if s.factor == "b" and not v]
        made = len(bank.adapters) if bank is not None else 0
        blueprint = preflight(setting.recipe, RECIPES / "sft.yaml")
        results.append(
            (
                backend.trainable_parameters() - blueprint.trainable_params,
                made,
                len(blueprint.adapters),
                silent,
            )
        )
    return results


def test_every_module_kind_is_adapted_and_counted(tmp_path):
    """2 Mamba mixers, 2 attentions, 2 layers of experts: 2·2 + 2·4 + 2·2, and 2·2 stacks of experts."""
    out_proj_left = "policy.dtensor_cfg.lora_cfg.exclude_modules=['*out_proj*']"
    settings = [
        hybrid(LORA, world=1),
        hybrid(LORA, PER_EXPERT, world=1),
        hybrid(LORA, SHARED, world=1),
        hybrid(LORA, PER_EXPERT, out_proj_left, world=1),
        hybrid(LORA, "policy.dtensor_cfg.lora_cfg.implementation=peft", out_proj_left, world=1),
        hybrid(world=1),
    ]
    (results,) = run_ranks(1, tmp_path / "ranks", counts_on_this_rank, settings)
    assert [made for _, made, _, _ in results] == [16, 20, 20, 18, 14, 0]
    for difference, made, planned, silent in results:
        assert (difference, made, silent) == (0, planned, [])


def packed(batch: MicroBatch, lengths: tuple[int, ...]) -> MicroBatch:
    """The first tokens of each row, one row behind the other."""
    parts = [slice(0, length) for length in lengths]
    ids, labels = (
        torch.cat([row[part] for row, part in zip(tensor, parts, strict=True)]).unsqueeze(0)
        for tensor in (batch.input_ids, batch.labels)
    )
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return MicroBatch(ids, labels, positions, Segments.of(lengths))


def packed_and_apart() -> tuple[list[float], list[float]]:
    """Loss and norm of rows in one sequence, and of each row alone."""
    lengths, found = (16, 9, 12, 14), []
    ids, labels = rows().input_ids, rows().labels
    apart = [MicroBatch(ids[i : i + 1, :n], labels[i : i + 1, :n]) for i, n in enumerate(lengths)]
    for batches in ([packed(rows(), lengths)], apart):
        backend = hybrid(LORA, PER_EXPERT, world=1).build()
        wake_adapters(backend)
        loss = backend.forward_backward(batches, 1)
        backend.sync_gradients()
        found.append([float(loss), float(backend.clip_gradients(None))])
    return found[0], found[1]


def test_packed_rows_do_not_see_each_other(tmp_path):
    ((together, apart),) = run_ranks(1, tmp_path / "ranks", packed_and_apart)
    assert together == pytest.approx(apart, rel=1e-9)
