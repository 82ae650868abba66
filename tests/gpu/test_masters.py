# SPDX-License-Identifier: Apache-2.0
"""The kernel that updates bfloat16 weights and what these lack of their masters, on a GPU."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.fast.masters import adam_update, join

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BETAS = (0.9, 0.98)


def test_the_kernel_keeps_weight_and_remainder_together() -> None:
    from lora_suite.train.fast import update_kernels

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    first = [draw(1000, 33), draw(77)]
    masters = []
    for update in (adam_update, update_kernels.adam_update):
        generator.manual_seed(1)
        weights = [each.clone() for each in first]
        remainders = [torch.zeros_like(each, dtype=torch.int16) for each in weights]
        moments = [[torch.zeros_like(each, dtype=torch.float32) for each in weights] for _ in range(2)]
        for step in range(1, 6):
            gradients = [draw(*each.shape) for each in weights]
            corrections = [1.0 - beta**step for beta in BETAS]
            scalars = torch.tensor([0.5, 1e-3, *corrections], device="cuda")
            update(remainders, moments[0], moments[1], gradients, weights, scalars, BETAS, 1e-8, 0.1, True)
        masters.append([join(*pair) for pair in zip(weights, remainders, strict=True)])
        for master, weight in zip(masters[-1], weights, strict=True):
            assert torch.equal(master.bfloat16(), weight)
    for plain, kernel in zip(*masters, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=0, atol=1e-6)
