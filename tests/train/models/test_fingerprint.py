# SPDX-License-Identifier: Apache-2.0
"""The fingerprint sees every bit, and nothing else."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.models import fingerprint as module
from lora_suite.train.models.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sees_any_single_bit(dtype):
    tensor = torch.randn(5, 7).to(dtype)
    before = fingerprint([("w", tensor)])
    octets = tensor.view(-1).view(torch.uint8)
    for position in range(octets.numel()):
        for bit in (1, 128):
            octets[position] ^= bit
            assert fingerprint([("w", tensor)]) != before
            octets[position] ^= bit
    assert fingerprint([("w", tensor)]) == before


def test_tells_zero_from_negative_zero_and_one_order_from_another():
    assert fingerprint([("w", torch.tensor([0.0]))]) != fingerprint([("w", torch.tensor([-0.0]))])
    tensor = torch.arange(64.0)
    assert fingerprint([("w", tensor)]) != fingerprint([("w", tensor.flip(0))])
    assert fingerprint([("w", tensor)]) != fingerprint([("w", tensor.view(8, 8))])
    assert fingerprint([("w", tensor)]) != fingerprint([("v", tensor)])


def test_equal_values_agree_however_they_lie_in_memory(monkeypatch):
    base = torch.randn(12, 10)
    copies = [base, base.t().contiguous().t(), torch.cat([torch.zeros(1), base.flatten()])[1:].view(12, 10)]
    assert len({fingerprint([("w", copy)]) for copy in copies}) == 1
    whole = fingerprint([("w", base)])
    monkeypatch.setattr(module, "WORDS_AT_ONCE", 7)
    assert fingerprint([("w", base)]) == whole


def test_nothing_has_no_fingerprint():
    assert fingerprint([]) == ""
