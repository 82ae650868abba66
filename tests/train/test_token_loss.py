# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy in parts equals torch's on the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lora_suite.train import token_loss as module
from lora_suite.train.batch import IGNORED
from lora_suite.train.token_loss import token_loss_sum


@pytest.fixture
def labels():
    ids = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    ids[0, :4] = IGNORED
    ids[2] = IGNORED
    return ids


def logits_like(labels, dtype):
    generator = torch.Generator().manual_seed(1)
    return (4 * torch.randn(*labels.shape, 50, generator=generator)).to(dtype).requires_grad_()


@pytest.mark.parametrize("at_once", [1, 170, 2**26])
def test_equals_torchs_cross_entropy(labels, at_once, monkeypatch):
    monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", at_once)
    ours, theirs = logits_like(labels, torch.float64), logits_like(labels, torch.float64)
    loss = token_loss_sum(ours, labels)
    expected = functional.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    (loss / 7).backward()
    (expected / 7).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_bfloat16_logits_are_summed_in_float32(labels):
    half = logits_like(labels, torch.bfloat16)
    exact = half.detach().double().requires_grad_()
    loss, expected = token_loss_sum(half, labels), token_loss_sum(exact, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert half.grad.dtype == torch.bfloat16
    # The gradient is rounded once, to bfloat16's 8 bits.
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=2**-8, atol=1e-9)


def test_no_supervised_position_is_zero_and_has_zero_gradient():
    labels = torch.full((2, 3), IGNORED)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_loss_sum(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))
