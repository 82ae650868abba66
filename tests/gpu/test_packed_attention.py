# SPDX-License-Identifier: Apache-2.0
"""The variable length kernel computes what plain causal attention does on each row by itself."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.batch import Segments
from lora_suite.train.models import attention
from lora_suite.train.models.attention import packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (300, 17, 1, 128, 66)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_the_kernel_agrees_with_rows_by_themselves(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, scale: float | None
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(sum(LENGTHS), count, 64) for count in (heads, kv_heads, kv_heads, heads)]
    *states, upstream = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes
    )
    segments = Segments.of(LENGTHS).to(torch.device("cuda"))

    def results() -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in states]
        output = packed_attention(leaves[0], leaves[1], leaves[2], segments, scale)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    assert attention._varlen_kernel() is not None, "torch 2.11 or newer has the kernel"
    with_kernel = results()
    monkeypatch.setattr(attention, "_varlen_kernel", lambda: None)
    for ours, plain in zip(with_kernel, results(), strict=True):
        # Both round sums of bfloat16 products; they differ by a few units of its last place.
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)
