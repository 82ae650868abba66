# SPDX-License-Identifier: Apache-2.0
"""Norms and activations made anew in the backward pass: the same numbers, and less that is kept till then.

In float64 with formulas in the kernels' place, through the whole backend; the kernels in Triton's
interpreter, whose switch must be set before Triton is imported, in a process of its own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lora_suite.train.fast import entry
from lora_suite.train.fast.entry import NormOps
from lora_suite.train.fast.layer_ops import LayerOps, layer_ops
from lora_suite.train.fast.mlp import GatedOps
from tests.train.dtensor.fast_ranks import build
from tests.train.dtensor.ranks import LORA, Setting, rows, run_ranks, share
from tests.train.dtensor.test_fast import factors
from tests.train.dtensor.test_fast_packed import packed_rows
from tests.train.fast.interpreter import check_in_interpreter
from tests.train.fast.test_entry import SHAPE, layer, results
from tests.train.fast.test_mlp import gated, gated_backward


def add_norm(x, residual, weight, eps, a):
    states = x if residual is None else x + residual
    inverse = torch.rsqrt(states.square().mean(-1) + eps)
    normal = states * inverse[:, None] * weight
    return torch.cat([normal, normal @ a.t()], 1), states, inverse


def norm_backward(d_normal, d_states, states, inverse, weight, weighted, recompute):
    unit = states * inverse[:, None]
    scaled = d_normal * weight
    d_x = (scaled - unit * (unit * scaled).mean(-1, keepdim=True)) * inverse[:, None] + d_states
    return d_x, (d_normal * unit).sum(0), (unit * weight)[: None if recompute else 0]


def norm_again(after, states, weight, eps, a):
    return add_norm(states, None, weight, eps, a)[0]


def formulas(recompute):
    norm = NormOps(add_norm, norm_backward, norm_again, recompute)
    return LayerOps(GatedOps(gated, gated_backward, recompute), norm)


def kept_of(call):
    """What call() gives, and the bytes that autograd keeps of it: each storage once."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = call()
    return made, sum(storages.values())


def step(backend, micro):
    """Loss, norm and every gradient of one step, and the bytes kept of rows that are not packed."""
    _, kept = kept_of(lambda: backend.model(rows().input_ids).sum())
    loss = backend.forward_backward(micro, 30).item()
    backend.sync_gradients()
    norm = backend.clip_gradients(None).item()
    found = factors(backend, backend.bank.master_gradient) if backend.bank is not None else {}
    backend.optimizer_step(1e-2)
    weights = [] if backend.bank is not None else [each.clone() for each in backend.model.parameters()]
    return loss, norm, [*found.values(), *weights], kept


def by_formulas(setting, packed):
    """A step without kernels, with formulas in their place, and with these recomputation, of both kinds."""
    # transformers computes norms in float32 whatever comes, and so does the path without kernels.
    entry.rms_norm = lambda x, weight, eps: add_norm(x, None, weight, eps, weight.new_empty(0, len(weight)))[
        0
    ]
    found = []
    for ops in (LayerOps(), formulas(False), formulas(True), formulas(True).with_products_anew()):
        backend = build(setting)
        backend.model.ops = ops
        for each in backend.model.layers:
            each.ops = ops
        dp = backend.topology.dp
        micro = [packed_rows(rows(), [0, 2, 3])] if packed else share(rows(), dp.index, dp.size, 4 // dp.size)
        found.append(step(backend, micro))
    return found


TP2 = "policy.dtensor_cfg.tensor_parallel_size=2"
SOME = "policy.dtensor_cfg.lora_cfg.target_modules=['*q_proj','*up_proj']"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "world", "packed"),
    [
        ((LORA,), 1, False),
        ((), 1, False),
        ((LORA, TP2), 2, False),
        ((TP2,), 2, False),
        ((LORA,), 1, True),
        ((), 1, True),
        ((LORA, SOME), 1, False),
    ],
    ids=["lora", "full", "lora-tp2", "full-tp2", "lora-packed", "full-packed", "lora-on-some"],
)
def test_recomputation_changes_no_gradient(tmp_path, overrides, world, packed):
    setting = Setting(overrides, precision="float64", world=world)
    one_mlp = LORA in overrides and SOME not in overrides
    for plain, kept, anew, products in run_ranks(world, tmp_path / "ranks", by_formulas, setting, packed):
        for found in (kept, anew, products):
            assert found[:2] == pytest.approx(plain[:2], rel=1e-12)
            for mine, right in zip(found[2], plain[2], strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-15)
        assert all(torch.equal(one, other) for one, other in zip(kept[2], anew[2], strict=True))
        assert anew[3] < kept[3]
        assert all(torch.equal(one, other) for one, other in zip(anew[2], products[2], strict=True))
        assert products[3] < anew[3] if one_mlp else products[3] == anew[3]


def check_layer(rank, thin, first):
    """The same bits; fewer bytes kept, counted by hand: by a compiler, what it kept twice goes, too."""
    # The first layer's input is an embedding, which trains where weights do.
    x = torch.randn(2, 5, SHAPE["hidden"]).requires_grad_(not first or rank is None)
    fed = None if first else torch.randn(2, 5, SHAPE["hidden"], requires_grad=True)
    dy = [torch.randn(2, 5, SHAPE["hidden"]) for _ in range(2)]
    found = {}
    for compiled in (None, "aot_eager_decomp_partition"):
        for recompute in (False, True):
            torch._dynamo.reset()
            made = layer(rank, layer_ops(torch.float32, recompute), thin)
            (y, gradients), kept = kept_of(partial(results, made, compiled, x, fed, dy))
            found[compiled, recompute] = (*y, *gradients), kept
        if rank is not None:
            made = layer(rank, layer_ops(torch.float32, True).with_products_anew(), thin)
            (y, gradients), kept = kept_of(partial(results, made, compiled, x, fed, dy))
            check_products((*y, *gradients), kept, found[compiled, True])
    for compiled in (None, "aot_eager_decomp_partition"):
        (right, before), (mine, after) = found[compiled, False], found[compiled, True]
        assert all(torch.equal(one, other) for one, other in zip(mine, right, strict=True))
        # n of the first norm is kept where the norm has no gradient.
        norms = 1 if first and rank is not None else 2
        less = 10 * (norms * SHAPE["hidden"] + SHAPE["intermediate"]) * 4
        assert before - after >= less if compiled else before - after == less


def check_products(mine, kept, anew):
    """The same bits; gate and up of 10 tokens are kept no more, nor is t before them (padded to 16)."""
    assert all(torch.equal(one, other) for one, other in zip(mine, anew[0], strict=True))
    less = 10 * 2 * SHAPE["intermediate"] * 4
    assert less <= anew[1] - kept <= less + 10 * 16 * 4


def in_interpreter():
    torch.manual_seed(0)
    for first in (True, False):
        check_layer(None, False, first)
        check_layer(3, True, first)
    check_layer(3, False, False)
    print("equal")


@pytest.mark.slow
def test_kernels_by_the_interpreter():
    check_in_interpreter("from tests.train.fast.test_recompute import in_interpreter as check; check()")
