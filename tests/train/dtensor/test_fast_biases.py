# SPDX-License-Identifier: Apache-2.0
"""Biases of every linear on the fast path, kept or made anew, against transformers' modules."""

from __future__ import annotations

import json

import pytest
import torch

from lora_suite.train.backends.dtensor.fast.decoder import LayerOps
from tests.train.dtensor.fast_ranks import build
from tests.train.dtensor.ranks import (
    LORA,
    TINY,
    Setting,
    factors_of,
    rows,
    run_ranks,
    supervised,
    wake_adapters,
)
from tests.train.fast.test_recompute import formulas


def step(backend, named):
    """Count of biases, all made to differ from zero; loss, norm and factors' gradients of one step."""
    biases = {name: tensor for name, tensor in named if name.endswith("_proj.bias")}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in sorted(biases):
            drawn = torch.randn(biases[name].shape, generator=generator, dtype=torch.float64)
            biases[name].copy_(drawn / 4)
    loss = backend.forward_backward([rows()], supervised(rows())).item()
    backend.sync_gradients()
    bank = backend.bank
    factors = factors_of(backend, bank.master_gradient) if bank is not None else {}
    return len(biases), loss, backend.clip_gradients(None).item(), factors


def by_paths(setting):
    """The same step on transformers' modules, on the fast path, and there with formulas for kernels."""
    backend = setting.build()
    if backend.bank is not None:
        wake_adapters(backend)
    found = [step(backend, backend.model.named_parameters())]
    for ops in (LayerOps(), formulas(False), formulas(True)):
        backend = build(setting)
        backend.model.ops = ops
        for layer in backend.model.layers:
            layer.ops = ops
        found.append(step(backend, backend.model.named_tensors()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arm", [(LORA,), ()], ids=["lora", "full"])
def test_every_linear_may_have_a_bias(tmp_path, arm):
    path = tmp_path / "biased.json"
    path.write_text(json.dumps(json.loads(TINY.read_text()) | {"attention_bias": True, "mlp_bias": True}))
    ((right, *found),) = run_ranks(1, tmp_path / "ranks", by_paths, Setting(arm, path, "float64"))
    assert right[0] == 2 * 7
    for mine in found:
        # transformers computes norms in float32 whatever comes.
        assert mine[:3] == pytest.approx(right[:3], rel=1e-5)
        assert mine[3].keys() == right[3].keys()
        for name, gradient in right[3].items():
            torch.testing.assert_close(mine[3][name], gradient, rtol=1e-4, atol=1e-6)
