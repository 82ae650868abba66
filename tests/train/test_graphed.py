# SPDX-License-Identifier: Apache-2.0
"""When passes are captured, and in which memory; a stand-in takes the place of the graphs, without a GPU."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any, ClassVar

import pytest
import torch

from lora_suite.train.backends import graphed
from lora_suite.train.batch import MicroBatch, Segments
from lora_suite.train.fast.capture import NotCaptured
from tests.train.dtensor.ranks import LORA, TINY_HYBRID, Setting, rows, run_ranks
from tests.train.dtensor.test_fast import build_fast, wake
from tests.train.dtensor.test_fast_packed import packed_rows

THREE_AND_ONE = (slice(0, 3), slice(3, 4))


class Graph:
    """A captured pass as the backend sees it: warmed up when it is made, then run.

    It writes gradients where they were when it was made: to new tensors, or in addition to what is there.
    """

    made: ClassVar[list[tuple[Any, int | None]]] = []
    gradients: ClassVar[set[int]] = set()
    refused: ClassVar[int | None] = None
    """Micro batches of so many rows cannot be captured."""

    def __init__(
        self, compute: Any, example: MicroBatch, clear: Callable[[], None], trained: Sequence[Any], pool: Any
    ) -> None:
        self.compute, self.trained = compute, trained
        for _ in range(2):
            clear()
            compute(*example.tensors)
        clear()
        if len(example.input_ids) == Graph.refused:
            raise NotCaptured("operation not permitted when stream is capturing")
        self.anew = all(each.grad is None for each in trained)
        compute(*example.tensors)
        self.kept = [each.grad for each in trained]
        Graph.gradients.add(self.kept[0].data_ptr())
        Graph.made.append((pool, None if example.segments is None else len(example.segments.lengths)))

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        for each, gradient in zip(self.trained, self.kept, strict=True):
            each.grad = None if self.anew else gradient
        loss: torch.Tensor = self.compute(*batch.tensors)
        for each, gradient in zip(self.trained, self.kept, strict=True):
            gradient.copy_(each.grad)
            each.grad = gradient
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


def pools_of_packs(setting: Setting, beside: bool) -> list[tuple[int, int | None]]:
    """The pools, in the order of their first use, and the rows of what was captured.

    beside: a kind that stays is captured with that which outgrows its room.
    """
    backend, batch = on_gpu(setting), rows()
    crowded = packed_rows(batch, [0, 1, 2])
    single = packed_rows(batch, [3])
    # As many rows as slots, which the first captures have no room for.
    slots = crowded.input_ids.numel()
    zeros = torch.zeros_like(crowded.input_ids)
    many = MicroBatch(crowded.input_ids, crowded.labels, zeros, Segments.of((1,) * slots))
    for micro_batch in (single, *([batch] if beside else []), crowded, many, single, batch):
        backend.forward_backward([micro_batch], 30)
    order: dict[int, int] = {}
    return [(order.setdefault(id(pool), len(order)), count) for pool, count in Graph.made]


@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["full", "lora"])
def test_only_the_kind_that_outgrows_its_room_is_captured_anew(
    tmp_path: Any, overrides: tuple[str, ...]
) -> None:
    made = run_ranks(1, tmp_path / "ranks", pools_of_packs, Setting(overrides), True)[0]
    assert made == [(0, 8), (0, None), (0, 64)]


def test_where_nothing_captured_stays_there_is_a_new_pool(tmp_path: Any) -> None:
    made = run_ranks(1, tmp_path / "ranks", pools_of_packs, Setting((LORA,)), False)[0]
    assert made == [(0, 8), (1, 64), (1, None)]


def gradients_of_uneven_parts(
    setting: Setting, refused: int | None
) -> tuple[torch.Tensor, torch.Tensor, int, str | None, str]:
    """Of the second of two steps of 3 and 1 rows; the shape of 1 is captured when there are gradients of 3.

    Without graphs, with stand-ins, where these have put the gradients, why the fast path was left, and what
    was said of it.
    refused: rows of the micro batch that cannot be captured.
    """
    found = []
    Graph.refused, said = refused, io.StringIO()
    for backend in (build_fast(setting), on_gpu(setting)):
        if backend.bank is not None:
            wake(backend)
        for seed in (0, 1):
            batch = rows(seed=seed)
            parts = [MicroBatch(batch.input_ids[part], batch.labels[part]) for part in THREE_AND_ONE]
            with redirect_stderr(said):
                backend.forward_backward(parts, 30)
            backend.sync_gradients()
            whole = [backend.bank.master_gradient] if backend.bank is not None else backend._full._gradients()
            seen = torch.cat([each.flatten() for each in whole])
            backend.optimizer_step(0.0)
        found.append(seen)
    return found[0], found[1], len(Graph.gradients), backend.slow_path_reason, said.getvalue()


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["full", "lora"])
def test_shapes_share_gradients_and_leave_each_others_alone(
    tmp_path: Any, overrides: tuple[str, ...], precision: str
) -> None:
    setting = Setting(overrides, precision=precision)
    plain, captured, places, left, said = run_ranks(
        1, tmp_path / "ranks", gradients_of_uneven_parts, setting, None
    )[0]
    assert torch.equal(captured, plain)
    assert plain.any()
    assert places == 1
    assert left is None
    assert said == ""


@pytest.mark.parametrize("refused", [3, 1])
@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["full", "lora"])
def test_what_cannot_be_captured_runs_as_it_is_and_is_told_once(
    tmp_path: Any, overrides: tuple[str, ...], refused: int
) -> None:
    plain, mixed, places, left, said = run_ranks(
        1, tmp_path / "ranks", gradients_of_uneven_parts, Setting(overrides), refused
    )[0]
    assert torch.equal(mixed, plain)
    assert places == 1
    assert left is not None
    assert left.startswith(f"micro batches of {refused} × ")
    assert left.endswith("slots cannot be captured: operation not permitted when stream is capturing")
    assert said == f"warning: the fast path is left: {left}\n"


def losses_of_shapes(setting: Setting) -> tuple[list[float], list[float]]:
    """Of micro batches of 4, 3, 1 and 2 rows, compiled and as it is."""
    batch, found = rows(), []
    for backend in (on_gpu(setting), build_fast(setting)):
        if backend._gpu:
            for layer in backend.model.layers:
                layer.compile(fullgraph=True, dynamic=False, backend="eager")
        parts = [slice(4), slice(3), slice(1), slice(2)]
        steps = [[MicroBatch(batch.input_ids[part], batch.labels[part])] for part in parts]
        found.append([backend.forward_backward(step, 30).item() for step in steps])
    return found[0], found[1]


@pytest.mark.slow
def test_many_kinds_of_layers_are_compiled_for_many_shapes(tmp_path: Any) -> None:
    setting = Setting((), TINY_HYBRID)
    compiled, plain = run_ranks(1, tmp_path / "ranks", losses_of_shapes, setting)[0]
    assert compiled == pytest.approx(plain, rel=1e-9)
