# SPDX-License-Identifier: Apache-2.0
"""Compiled and captured: packed rows train like padded ones, PEFT's layers like eager PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_suite.blueprint.preflight import preflight
from lora_suite.train.backends.dtensor import fast
from lora_suite.train.backends.dtensor.build import build as build_plain
from lora_suite.train.batch import MicroBatch, Segments
from tests.train.dtensor.ranks import LORA, RECIPES, Setting, rows, run_ranks
from tests.train.dtensor.test_fast import PEFT, wake
from tests.train.dtensor.test_fast_packed import packed_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = RECIPES / "sft.yaml"
TOKENS = 30
Step = tuple[float, torch.Tensor]
"""Summed loss and the adapters' gradients."""


def one_step(backend: Any, batches: list[MicroBatch]) -> Step:
    """Of woken adapters; the second of two, so that graphs are replayed."""
    wake(backend)
    device = backend.topology.device
    batches = [batch.to(device) for batch in batches]
    backend.forward_backward(batches, TOKENS)
    backend.optimizer_step(0.0)
    loss = backend.forward_backward(batches, TOKENS)
    backend.sync_gradients()
    return loss.item(), backend.bank.master_gradient.cpu()


def graphed(setting: Setting) -> Any:
    """The backend as it is on a GPU."""
    blueprint = preflight(setting.recipe, RECIPE)
    return fast.build(setting.recipe, RECIPE, blueprint, torch.device("cuda"), gpu=True)


def of_every_packing(setting: Setting) -> tuple[list[Step], int]:
    """Rows padded, packed, and packed as if they were one row; captures of the packed ones."""
    batch, backend = rows(), graphed(setting)
    packs = [packed_rows(batch, which) for which in ([0, 2, 3], [1])]
    joined = [MicroBatch(pack.input_ids, pack.labels, pack.positions, Segments.of((48,))) for pack in packs]
    padded = one_step(graphed(setting), [batch])
    packed = one_step(backend, packs)
    captures = len(backend._captured)
    return [padded, packed, one_step(graphed(setting), joined)], captures


@pytest.mark.parametrize("arm", [(LORA,), (LORA, PEFT)], ids=["lora", "peft"])
@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_one_graph_serves_every_pack(
    tmp_path: Path, arm: tuple[str, ...], precision: str, limit: float
) -> None:
    ((padded, packed, joined), captures) = run_ranks(
        1, tmp_path / "ranks", of_every_packing, Setting(arm, precision=precision)
    )[0]
    assert captures == 1
    assert packed[0] == pytest.approx(padded[0], rel=limit / 10)
    assert difference(packed, padded) < limit
    # Rows that see each other are told from those that do not.
    assert difference(joined, padded) > 3 * limit


def outgrown(setting: Setting, beside: bool) -> tuple[list[float], int]:
    """Losses of a pack, of one with more rows than there is room for, and of the first again; captures.

    beside: padded rows, whose graph stays, come first and last.
    """
    backend = graphed(setting)
    narrow = packed_rows(rows(), [3])
    zeros = torch.zeros_like(narrow.input_ids)
    crowded = MicroBatch(narrow.input_ids, narrow.labels, zeros, Segments.of((1,) * zeros.numel()))
    padded = [rows()] if beside else []
    batches = [each.to(torch.device("cuda")) for each in (*padded, narrow, crowded, narrow, *padded)]
    losses = [backend.forward_backward([each], TOKENS).item() for each in batches]
    return losses, len(backend._captured)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("arm", [(LORA,), ()], ids=["lora", "full"])
def test_a_pack_without_room_is_captured_anew(tmp_path: Path, arm: tuple[str, ...], beside: bool) -> None:
    setting = Setting(arm, precision="bfloat16")
    losses, captures = run_ranks(1, tmp_path / "ranks", outgrown, setting, beside)[0]
    middle = len(losses) // 2
    assert losses[:middle] == pytest.approx(losses[:middle:-1], rel=1e-5)
    assert losses[middle] != losses[middle - 1]
    assert captures == 1 + beside


def in_parts(setting: Setting) -> list[torch.Tensor]:
    """Gradients of all weights: of a batch at once, and of 3 rows and 1, each shape captured."""
    found = []
    for parts in ([slice(4)], [slice(3), slice(3, 4)]):
        backend, batch = graphed(setting), rows().to(torch.device("cuda"))
        cut = [MicroBatch(batch.input_ids[part], batch.labels[part]) for part in parts]
        for _ in range(2):
            backend.forward_backward(cut, TOKENS)
        backend.sync_gradients()
        found.append(torch.cat([each.flatten().cpu() for each in backend._full._gradients()]))
    return found


def test_shapes_that_share_gradients_add_up(tmp_path: Path) -> None:
    whole, parts = run_ranks(1, tmp_path / "ranks", in_parts, Setting(precision="float32"))[0]
    assert ((parts - whole).norm() / whole.norm()).item() < 1e-5


def eager_and_graphed(setting: Setting) -> tuple[Step, Step]:
    """Of the same rows."""
    plain = build_plain(setting.recipe, RECIPE, preflight(setting.recipe, RECIPE), torch.device("cuda"))
    return one_step(plain, [rows()]), one_step(graphed(setting), [rows()])


def test_captured_peft_trains_like_eager_peft(tmp_path: Path) -> None:
    setting = Setting((LORA, PEFT), precision="float32")
    eager, captured = run_ranks(1, tmp_path / "ranks", eager_and_graphed, setting)[0]
    assert captured[0] == pytest.approx(eager[0], rel=1e-5)
    assert difference(captured, eager) < 1e-4


def difference(one: Step, other: Step) -> float:
    """Relative size of the difference of two gradients."""
    return float((one[1] - other[1]).norm() / other[1].norm())
