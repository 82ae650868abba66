# SPDX-License-Identifier: Apache-2.0
"""Kernels of the recurrence and of experts, run by Triton's interpreter on the CPU, against plain torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from lora_suite.train.fast.scan import through_kernels
from lora_suite.train.models.mamba import recurrence

generator = torch.Generator().manual_seed(0)
rows, length, groups, state, heads, channels = 2, 131, 2, 32, 4, 16
# q is a part of wider rows, as it is of the convolution's output.
wide = torch.randn(rows, length, 3 * groups * state, generator=generator)
q = wide[..., : groups * state].view(rows, length, groups, state).requires_grad_()
k = (torch.randn(rows, length, groups, state, generator=generator) * 0.3).requires_grad_()
v = torch.randn(rows, length, heads, channels, generator=generator).requires_grad_()
decay = (-torch.rand(rows, length, heads, generator=generator) * 0.2).requires_grad_()
dy = torch.randn(rows, length, heads, channels, generator=generator)
starts = torch.rand(rows, length, generator=generator) < 0.05
for where in (None, starts):
    y = through_kernels(q, k, v, decay, where)
    wanted = [each.detach().double().requires_grad_() for each in (q, k, v, decay)]
    expected = recurrence(*wanted, where, 16)
    pairs = [(y, expected)]
    found = torch.autograd.grad(y, (q, k, v, decay), dy)
    pairs += zip(found, torch.autograd.grad(expected, wanted, dy.double()), strict=True)
    for mine, theirs in pairs:
        error = ((mine - theirs).norm() / theirs.norm()).item()
        assert error < 1e-5, error
print("equal")
"""


@pytest.mark.slow
def test_kernels_compute_the_recurrence_and_its_gradients(monkeypatch):
    """In a process of its own: the interpreter must be chosen before a kernel is defined."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr


EXPERTS = """
import torch
from lora_suite.train.fast import expert_kernels, expert_rows

generator = torch.Generator().manual_seed(0)
tokens, choices, width, extra = 5, 3, 1500, 8
rows = tokens * choices
x = torch.randn(tokens, width, generator=generator)
order = torch.randperm(rows, generator=generator)
places = torch.argsort(order)
weights = torch.rand(tokens, choices, generator=generator)
h, d = (torch.randn(rows, width, generator=generator) for _ in range(2))
# The last four rows are of other ranks' experts, and hold anything.
own = rows - 4
ends = torch.tensor([2, 2, own], dtype=torch.int32)
h[own:], d[own:] = float("nan"), float("nan")


def filled(call):
    out = torch.full((rows, width + extra), 7.0)
    call(out)
    assert bool((out[:, width:] == 7.0).all())
    assert bool((out[own:] == 7.0).all())
    return out[:own, :width]


d_weights = torch.empty(rows)
pairs = [
    (filled(lambda out: expert_kernels.gather(x, order, ends, choices, out)),
     expert_rows.gather(x, order, ends, choices, 0)[:own]),
    (filled(lambda out: expert_kernels.relu2(h, weights, order, ends, out)),
     expert_rows.relu2(h, weights, order, ends, 0)[:own]),
    (filled(lambda out: expert_kernels.relu2_backward(h, d, weights, order, ends, out, d_weights)),
     expert_rows.relu2_backward(h, d, weights, order, ends, 0)[0][:own]),
    (d_weights, expert_rows.relu2_backward(h, d, weights, order, ends, 0)[1]),
    (expert_kernels.combine(h, places, ends, choices, torch.empty(tokens, width)),
     expert_rows.combine(h, places, ends, choices, width)),
]
for mine, theirs in pairs:
    assert bool(mine.isfinite().all())
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
print("equal")
"""


def test_the_experts_kernels_compute_what_plain_torch_does(monkeypatch):
    """As above; nothing is written into columns that are left free, or rows of other ranks."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-c", EXPERTS], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr
