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

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in states]
        output = packed_attention(leaves[0], leaves[1], leaves[2], segments, scale)
        made = [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(dtype))]
        return [each.float() for each in made]

    assert attention.VARLEN is not None, "torch 2.11 or newer has the kernel"
    exact, with_kernel = results(torch.float32), results(torch.bfloat16)
    monkeypatch.setattr(attention, "VARLEN", None)
    for truth, ours, plain in zip(exact, with_kernel, results(torch.bfloat16), strict=True):
        # Both round to bfloat16; the kernel may be off by twice as much as the plain form.
        assert 0 < (ours - truth).norm() <= 2 * (plain - truth).norm()
