# SPDX-License-Identifier: Apache-2.0
"""When passes are captured, and in which memory; a stand-in takes the place of the graphs, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from lora_suite.train.backends import graphed
from lora_suite.train.batch import MicroBatch, Segments
from tests.train.dtensor.ranks import LORA, Setting, rows, run_ranks
from tests.train.dtensor.test_fast import build_fast, packed_rows, wake


class Graph:
    """A captured pass as the backend sees it: warmed up when it is made, then run."""

    made: ClassVar[list[tuple[Any, int | None]]] = []

    def __init__(
        self, compute: Any, example: MicroBatch, clear: Callable[[], None], trained: Sequence[Any], pool: Any
    ) -> None:
        self.compute = compute
        for _ in range(2):
            clear()
            compute(*example.tensors)
        clear()
        Graph.made.append((pool, None if example.segments is None else len(example.segments.lengths)))

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.compute(*batch.tensors)
        return loss


def on_gpu(setting: Setting) -> Any:
    """A fast backend that captures stand-ins."""
    graphed.CapturedPass = Graph  # type: ignore[assignment,misc]
    torch.cuda.graph_pool_handle = object  # type: ignore[assignment]
    backend = build_fast(setting)
    backend._gpu, backend._pool = True, object()
    if backend.bank is not None:
        wake(backend)
    return backend


def pools_of_packs(setting: Setting) -> list[tuple[int, int | None]]:
    """The pools, in the order of their first use, and the rows of what was captured."""
    backend, batch = on_gpu(setting), rows()
    crowded = packed_rows(batch, [0, 1, 2])
    single = packed_rows(batch, [3])
    for pack in (single, batch, crowded):
        backend.forward_backward([pack], 30)
    # As many rows as slots, which the first captures have no room for.
    slots = crowded.input_ids.numel()
    zeros = torch.zeros_like(crowded.input_ids)
    many = MicroBatch(crowded.input_ids, crowded.labels, zeros, Segments.of((1,) * slots))
    for pack in (many, single):
        backend.forward_backward([pack], 30)
    order: dict[int, int] = {}
    return [(order.setdefault(id(pool), len(order)), count) for pool, count in Graph.made]


def test_what_is_captured_anew_is_captured_in_a_pool_of_its_own(tmp_path: Any) -> None:
    made = run_ranks(1, tmp_path / "ranks", pools_of_packs, Setting((LORA,)))[0]
    assert made == [(0, 8), (0, None), (1, 64)]


def gradients_of_uneven_parts(setting: Setting) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a step of 3 and 1 rows, whose second shape is captured when the first has left its gradients."""
    batch = rows()
    parts = [MicroBatch(batch.input_ids[part], batch.labels[part]) for part in (slice(0, 3), slice(3, 4))]
    found = []
    for backend in (build_fast(setting), on_gpu(setting)):
        if backend.bank is not None:
            wake(backend)
        backend.forward_backward(parts, 30)
        backend.sync_gradients()
        of = backend.bank.master_gradient if backend.bank is not None else None
        found.append([of] if of is not None else [each.clone() for each in backend._full._gradients()])
    return found[0], found[1]


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["full", "lora"])
def test_a_capture_within_a_step_leaves_its_gradients_alone(
    tmp_path: Any, overrides: tuple[str, ...], precision: str
) -> None:
    setting = Setting(overrides, precision=precision)
    plain, captured = run_ranks(1, tmp_path / "ranks", gradients_of_uneven_parts, setting)[0]
    for mine, theirs in zip(captured, plain, strict=True):
        assert torch.equal(mine, theirs)
