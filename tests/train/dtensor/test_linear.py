# SPDX-License-Identifier: Apache-2.0
"""A linear that has become one with its adapter: compiled, switched off, and with a bias split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lora_suite.train.backends.dtensor.linear import LoraLinear
from lora_suite.train.backends.dtensor.parallel import build_mesh
from lora_suite.train.lora.adapter import Adapter
from tests.train.dtensor.ranks import run_ranks
from tests.train.lora.adapters import bank_of, spec


def adapted():
    torch.manual_seed(0)
    linear = nn.Linear(6, 8, dtype=torch.float64).requires_grad_(False)
    bank = bank_of([Adapter("q", 6, 8, spec())])
    return LoraLinear.adapt(linear, bank.adapters[0]), bank


def step(module, bank):
    """Output, input gradient and the bank's gradient of two micro batches."""
    bank.gradient.zero_()
    for seed in (1, 2):
        x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x.requires_grad_()
        y = module(x)
        y.square().sum().backward()
    return y.detach(), x.grad, bank.gradient.clone()


def test_it_compiles_as_one_graph_and_gives_the_same():
    module, bank = adapted()
    eager = step(module, bank)
    torch._dynamo.reset()
    compiled = step(torch.compile(module, backend="aot_eager", fullgraph=True), bank)
    for mine, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert bool(eager[2].any())


def test_switched_off_it_is_the_plain_linear_bit_by_bit():
    module, bank = adapted()
    x = torch.randn(3, 6, dtype=torch.float64)
    with bank.disabled():
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert not torch.allclose(module(x), nn.functional.linear(x, module.weight, module.bias))


def biased_on_this_rank():
    """Output and input gradient of up and down with biases: split over two ranks, and whole."""
    mesh, where = build_mesh(torch.device("cpu"), 2)
    results = []
    for split in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double().requires_grad_(False)
        sites = (("up", 6, 8, "column"), ("down", 8, 6, "row"))
        adapters = [
            Adapter(name, inputs, outputs, spec(), placement if split else "none", where.tp)
            for name, inputs, outputs, placement in sites
        ]
        if split:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for linear, adapter in zip(model, adapters, strict=True):
            LoraLinear.adapt(linear, adapter)
        bank_of(adapters, where)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x.requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    return results


@pytest.mark.slow
def test_biases_are_added_once_under_tensor_parallelism(tmp_path):
    for whole, split in run_ranks(2, tmp_path / "ranks", biased_on_this_rank):
        for mine, theirs in zip(split, whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
