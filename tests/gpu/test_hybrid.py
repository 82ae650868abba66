# SPDX-License-Identifier: Apache-2.0
"""The hybrid model's kernels in bfloat16 on a GPU, and its step compiled and captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_suite.train.batch import MicroBatch
from lora_suite.train.models.mamba import recurrence
from tests.gpu.test_fast_packed import difference, graphed, one_step
from tests.train.dtensor.ranks import LORA, TINY_HYBRID, Setting, rows, run_ranks
from tests.train.dtensor.test_fast import BLOCK
from tests.train.dtensor.test_fast_packed import packed_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# bfloat16 rounds to 2^-9; sums are in float32.
ROUNDING = 5e-3


def drawn(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * scale).bfloat16()


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_recurrence_is_the_plain_one_in_float64(packed: bool) -> None:
    """At Nemotron-3-Nano's sizes: heads that forget at once and heads that hardly do."""
    from lora_suite.train.fast.scan import through_kernels

    torch.manual_seed(0)
    length, groups, state, heads, channels = 1000, 8, 128, 64, 64
    q, k = drawn(1, length, groups, state), drawn(1, length, groups, state, scale=0.1)
    v, dy = drawn(1, length, heads, channels), drawn(1, length, heads, channels)
    rates = torch.linspace(0.001, 2.0, heads, device="cuda")
    decay = -torch.rand(1, length, heads, device="cuda") * rates
    starts = torch.rand(1, length, device="cuda") < 0.03 if packed else None

    def step(compute: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
        leaves = [each.detach().to(dtype or each.dtype).requires_grad_() for each in (q, k, v, decay)]
        y = compute(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    found = step(lambda *leaves: through_kernels(*leaves, starts), None)
    expected = step(lambda *leaves: recurrence(*leaves, starts, 64), torch.float64)
    again = step(lambda *leaves: through_kernels(*leaves, starts), None)
    for mine, repeated, theirs in zip(found, again, expected, strict=True):
        assert torch.equal(mine, repeated)
        assert ((mine.double() - theirs).norm() / theirs.norm()).item() < ROUNDING


def packed_and_padded(setting: Setting) -> list[Any]:
    """One captured step of the same rows, both ways."""
    batch: MicroBatch = rows()
    packs = [packed_rows(batch, which) for which in ([0, 2, 3], [1])]
    return [one_step(graphed(setting), packs), one_step(graphed(setting), [batch])]


def test_a_captured_step_of_packed_rows_is_that_of_padded_ones(tmp_path: Path) -> None:
    setting = Setting((LORA, f"{BLOCK}.experts=per_expert"), TINY_HYBRID, "bfloat16")
    packed, padded = run_ranks(1, tmp_path / "ranks", packed_and_padded, setting)[0]
    assert packed[0] == pytest.approx(padded[0], rel=1e-2)
    # A row that is rounded otherwise may go to another expert, so this is no bound on rounding alone.
    assert difference(packed, padded) < 0.2
