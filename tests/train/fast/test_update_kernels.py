# SPDX-License-Identifier: Apache-2.0
"""The kernels around loss and update against torch's own, by Triton's interpreter in a process of its own."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.batch import IGNORED
from tests.train.fast.interpreter import check_in_interpreter


def check_adam(name, dtype):
    """Three steps of torch's optimizer and of the kernel, whose gradients are half of it, with factor 2."""
    from lora_suite.train.fast.masters import join
    from lora_suite.train.fast.update_kernels import adam_update

    weight = torch.randn(1500).to(dtype)
    remainders = [torch.zeros(1500, dtype=torch.int16)] if dtype == torch.bfloat16 else None
    reference = torch.nn.Parameter(weight.float())
    optimizer = getattr(torch.optim, name)(
        [reference], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False
    )
    first, second = torch.zeros(1500), torch.zeros(1500)
    for step in range(1, 4):
        reference.grad = torch.randn(1500)
        optimizer.step()
        scalars = torch.tensor([2.0, 0.01, 1 - 0.8**step, 1 - 0.9**step])
        adam_update(
            remainders, [first], [second], [reference.grad / 2], [weight], scalars, (0.8, 0.9), 1e-6, 0.1,
            name == "AdamW",
        )  # fmt: skip
    master = weight if remainders is None else join(weight, remainders[0])
    torch.testing.assert_close(master, reference.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight, master.to(dtype))


def check_sgd(dtype):
    """As above; SGD has no moments."""
    from lora_suite.train.fast.masters import join
    from lora_suite.train.fast.update_kernels import sgd_update

    weight = torch.randn(1500).to(dtype)
    remainders = [torch.zeros(1500, dtype=torch.int16)] if dtype == torch.bfloat16 else None
    reference = torch.nn.Parameter(weight.float())
    optimizer = torch.optim.SGD([reference], lr=0.01, weight_decay=0.1, foreach=False)
    for _ in range(3):
        reference.grad = torch.randn(1500)
        optimizer.step()
        sgd_update(remainders, [reference.grad / 2], [weight], torch.tensor([2.0, 0.01, 0.0, 0.0]), 0.1)
    master = weight if remainders is None else join(weight, remainders[0])
    torch.testing.assert_close(master, reference.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weight, master.to(dtype))


def check_copies():
    from lora_suite.train.fast.update_kernels import FrameCopies

    flat = torch.randn(3 * 700 + 9 * 3)
    a, b = flat[: 3 * 700].view(3, 700), flat[3 * 700 :].view(9, 3)
    matrix = torch.full((20, 720), 7.0, dtype=torch.float16)
    targets = [matrix[9:12, :700], matrix[:9, 701:704]]
    FrameCopies(flat, [a, b], targets, [False, True], 4.0)()
    assert torch.equal(targets[0], a.half())
    assert torch.equal(targets[1], (4.0 * b).half())
    assert (matrix == 7.0).sum() == matrix.numel() - flat.numel()


def check_loss():
    from lora_suite.train.fast.loss_kernel import chunk_loss

    labels = torch.tensor([3, IGNORED, 9000, 0])
    logits = torch.randn(4, 9001) * 4
    logits[2, 5000] = 90.0  # would overflow without the row's largest
    leaf = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, labels, ignore_index=IGNORED, reduction="sum")
    (0.25 * loss).backward()
    mine, gradient = chunk_loss(logits, labels, torch.tensor(0.25))
    torch.testing.assert_close(mine, loss.detach())
    torch.testing.assert_close(gradient, leaf.grad)


def in_interpreter():
    torch.manual_seed(0)
    for name in ("Adam", "AdamW"):
        check_adam(name, torch.float32)
        check_adam(name, torch.bfloat16)
    check_sgd(torch.float32)
    check_sgd(torch.bfloat16)
    check_copies()
    check_loss()
    print("equal")


@pytest.mark.slow
def test_kernels_by_the_interpreter():
    check_in_interpreter("from tests.train.fast.test_update_kernels import in_interpreter as c; c()")
