# SPDX-License-Identifier: Apache-2.0
"""Norms, room beside, and rotary embedding by kernels, in Triton's interpreter; layers of them, compiled.

The interpreter's switch must be set before Triton is imported, so the checks run in processes of their own.
Right is what transformers' formulas give in float64, or in the dtype at hand, by autograd.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import pytest
import torch
from torch import nn

from lora_suite.train.backends.dtensor.fast.decoder import DecoderLayer, Sizes
from lora_suite.train.fast.collectives import ALONE
from lora_suite.train.fast.entry import Norm, norm_ops, normed, rms_norm
from lora_suite.train.fast.layer_ops import LayerOps, layer_ops
from lora_suite.train.fast.linears import StackedLinear, beside_op, thin_ops
from lora_suite.train.fast.rotary import rotary_ops, rotated
from tests.train.fast.interpreter import check_in_interpreter
from tests.train.fast.test_thin import framed

SHAPE = {"hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 20}
EPS = 1e-3


def close(mine, right, tolerance=1e-5):
    assert mine.shape == right.shape
    assert (mine.double() - right.double()).norm() <= tolerance * right.double().norm()


def double(*tensors):
    return [None if each is None else each.detach().double().requires_grad_() for each in tensors]


def by_formula(x, residual, weight):
    states = x if residual is None else x + residual
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * weight, states


def check_norm(tokens, width, summed, trained):
    """Of rows that lie apart, with and without a residual and a weight that trains."""
    x = torch.randn(tokens, width + 3)[:, :width].requires_grad_()
    residual = torch.randn(tokens, width, requires_grad=True) if summed else None
    weight = torch.rand(width).requires_grad_(trained)
    given = (x, residual, weight)
    trains = [each is not None and each.requires_grad for each in given]
    found = normed(x, residual, Norm(weight, EPS, norm_ops()))
    directions = [torch.randn(tokens, width) for _ in range(2)]
    mine = torch.autograd.grad(found, [*compress(given, trains)], directions)
    copies = double(*given)
    right = by_formula(*copies)
    theirs = torch.autograd.grad(right, [*compress(copies, trains)], [each.double() for each in directions])
    for got, wanted in zip((*found, *mine), (*right, *theirs), strict=True):
        close(got, wanted)


def check_rounding():
    """In 16 bits h and n are rounded where the formula rounds; float16 the interpreter rounds right."""
    x, residual = (torch.randn(5, 40).half() for _ in range(2))
    weight = torch.rand(40).half()
    out, states, _ = norm_ops().add_norm(x, residual, weight, EPS, weight.new_empty(0, 40))
    assert torch.equal(states, x + residual)
    right = rms_norm(x + residual, weight, EPS)
    # The root's last bit may tip a rounding here and there.
    assert (out != right).float().mean() < 0.02
    close(out, right, 1e-3)


def check_beside(tokens, rank):
    """Of rows that lie apart, of as many features as no block has."""
    x = torch.randn(tokens, 3000)[:, :2500]
    a = torch.randn(rank, 2510)[:, :2500]
    found = beside_op()(x, a)
    assert torch.equal(found[:, :2500], x)
    close(found[:, 2500:], x.double() @ a.double().t())


def check_rotary():
    """Of two rows, with angles of two halves that differ, and gradients in attention's other layout."""
    rows, length, heads, kv_heads, channels = 2, 3, 18, 2, 8
    states = torch.randn(rows, length, heads + 2 * kv_heads, channels, requires_grad=True)
    rotation = torch.randn(length, channels), torch.randn(length, channels)
    found = rotated(states, rotation, (heads, kv_heads), rotary_ops())
    directions = [torch.randn(rows, each.shape[2], length, channels).transpose(1, 2) for each in found]
    (mine,) = torch.autograd.grad(found, states, directions)
    (leaf,) = double(states)
    cos, sin = (each.double()[None, :, None] for each in rotation)
    # Channel c turns with the one half a head away: (a, b) to (a·cos − b·sin, b·cos + a·sin).
    turned = torch.cat([-leaf[..., channels // 2 :], leaf[..., : channels // 2]], -1)
    query, key, value = torch.where(
        (torch.arange(heads + 2 * kv_heads) < heads + kv_heads)[:, None], leaf * cos + turned * sin, leaf
    ).split([heads, kv_heads, kv_heads], 2)
    for got, wanted in zip(found, (query, key, value), strict=True):
        assert got.is_contiguous()
        close(got, wanted)
    (expected,) = torch.autograd.grad((query, key, value), leaf, [each.double() for each in directions])
    close(mine, expected)
    # Nine queries, their key and its value, and the same again.
    order = [*range(9), 18, 20, *range(9, 18), 19, 21]
    grouped = states.detach()[:, :, order].requires_grad_()
    for ops in (rotary_ops(), None):
        again = rotated(grouped, rotation, (heads, kv_heads), ops, grouped=True)
        for got, wanted in zip(again, found, strict=True):
            close(got, wanted)
        (reordered,) = torch.autograd.grad(again, grouped, directions)
        close(reordered, mine[:, :, order])


def layer(rank, ops, thin):
    """A layer, framed where there is a rank, with kernels or without."""
    torch.manual_seed(0)

    def make(name, inputs, widths, bias):
        if rank is None:
            linear = StackedLinear(inputs, widths, bias, torch.float32, torch.device("cpu"))
            nn.init.normal_(linear.weight, std=0.3)
            return linear
        linear = framed(inputs, widths, range(len(widths)), rank, joined=True)
        if ops.gated is not None:
            linear.beside = beside_op()
        if thin:
            linear.use(thin_ops())
        return linear

    def norm(width):
        return nn.Parameter(torch.rand(width) + 0.5, requires_grad=rank is None)

    shape = type(
        "Shape", (), {**SHAPE, "qk_norm": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False}
    )
    sizes = Sizes(SHAPE["heads"], SHAPE["kv_heads"], SHAPE["head_dim"], EPS)
    return DecoderLayer("layer", shape, sizes, make, norm, ops, ALONE)


def results(layer, compiled, x, fed, dy):
    """Output and gradients of a layer; of its input, and of whatever trains. compiled: a backend's name."""
    run = torch.compile(layer, fullgraph=True, dynamic=False, backend=compiled) if compiled else layer
    factors = [factor for each in layer.modules() if hasattr(each, "factors") for factor in each.factors]
    trained = factors or list(layer.parameters())
    cos, sin = (torch.randn(x.shape[1], 8, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    leaves = [*([x] if x.requires_grad else []), *([] if fed is None else [fed]), *trained]
    y = run(x, fed, (cos, sin))
    return y, torch.autograd.grad(y, leaves, dy)


def check_layer(rank, thin, first, **without):
    """Kernels, written and compiled, give what plain torch gives; first: after an embedding."""
    ops = replace(layer_ops(torch.float32), **without)
    x = torch.randn(2, 5, 24).requires_grad_(not first or rank is None)
    fed = None if first else torch.randn(2, 5, 24, requires_grad=True)
    dy = [torch.randn(2, 5, 24) for _ in range(2)]
    right, wanted = results(layer(rank, LayerOps(), False), None, x, fed, dy)
    for compiled in (None, "aot_eager"):
        y, found = results(layer(rank, ops, thin), compiled, x, fed, dy)
        for got, each in zip((*y, *found), (*right, *wanted), strict=True):
            close(got, each, 1e-4)


def check_fakes():
    """Shapes and strides that a compiler is told are those that come."""
    from lora_suite.train.fast import beside_kernels, entry_kernels, rotary_kernels

    x, weight, a = torch.randn(5, 24), torch.randn(24), torch.randn(8, 24)
    tests = ("test_schema", "test_faketensor")
    for residual in (None, torch.randn(5, 24)):
        torch.library.opcheck(entry_kernels.add_norm, (x, residual, weight, EPS, a), test_utils=tests)
    torch.library.opcheck(beside_kernels.beside, (x, a), test_utils=tests)
    for modes in ((False, False), (True, False), (False, True)):
        inputs = (x, x, x, torch.rand(5), weight, *modes)
        torch.library.opcheck(entry_kernels.norm_backward, inputs, test_utils=tests)
    states, cos = torch.randn(2, 3, 8, 4), torch.randn(3, 4)
    for grouped in (False, True):
        torch.library.opcheck(rotary_kernels.rotate, (states, cos, cos, 4, 2, grouped), test_utils=tests)
        inputs = (states[:, :, :4], states[:, :, :2], states[:, :, 2:4], cos, cos, grouped)
        torch.library.opcheck(rotary_kernels.rotate_backward, inputs, test_utils=tests)


def kernels_in_interpreter():
    torch.manual_seed(0)
    check_norm(5, 24, summed=True, trained=True)
    check_norm(3, 70, summed=False, trained=True)
    check_norm(600, 16, summed=True, trained=True)
    check_norm(5, 24, summed=True, trained=False)
    check_rounding()
    check_beside(5, 8)
    check_beside(70, 20)
    check_beside(5, 40)
    check_rotary()
    check_fakes()
    print("equal")


def layers_in_interpreter():
    torch.manual_seed(0)
    for first in (True, False):
        check_layer(None, False, first)
        check_layer(3, True, first)
    check_layer(3, False, False)
    check_layer(3, True, False, norm=None, rotary=None)
    print("equal")


@pytest.mark.slow
@pytest.mark.parametrize("check", [kernels_in_interpreter, layers_in_interpreter])
def test_in_the_interpreter(check):
    check_in_interpreter(f"from tests.train.fast.test_entry import {check.__name__} as check; check()")
