# SPDX-License-Identifier: Apache-2.0
"""Operations of thin frames: outputs and gradients by the definition W + s·B·A, by Triton's interpreter.

The interpreter's switch must be set before Triton is imported, so the checks run in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lora_suite.train.fast.linears import THIN, FramedLinear, ThinOps, refresh, thin_ops
from lora_suite.train.fast.mlp import GatedOps, gated_mlp
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.spec import LoraSpec
from tests.train.fast.interpreter import check_in_interpreter

CPU = torch.device("cpu")


def framed(inputs, widths, positions, rank, joined, groups=1):
    """A framed linear with random weights; joined: its factors are one flat parameter."""
    spec = LoraSpec(
        rank=rank, alpha=3.0 * rank, dropout=0.0, dropout_position="pre",
        a_init="xavier", b_init="zero", dtype=None, seed=0,
    )  # fmt: skip
    sizes = [size for position in positions for size in (rank * inputs, rank * widths[position])]
    flat = nn.Parameter(torch.randn(sum(sizes)) * 0.3)
    parts = iter(torch.split(flat.detach(), sizes))
    adapters = {}
    for position in positions:
        made = Adapter(f"{position}", inputs, widths[position], spec)
        made.a = nn.Parameter(next(parts).view(rank, inputs))
        made.b = nn.Parameter(next(parts).view(widths[position], rank))
        adapters[position] = made
    linear = FramedLinear(inputs, widths, False, adapters, torch.float32, CPU, groups)
    linear.weight.copy_(torch.randn(sum(widths), inputs) * 0.3)
    if joined:
        linear.join(flat)
    refresh([linear])
    return linear


def merged(linear, factors):
    """W + s·B·A, differentiable by the factors (A and B of each adapter in turn)."""
    pairs = dict(zip(linear.by_position, zip(factors[::2], factors[1::2], strict=True), strict=True))
    groups = linear.groups
    alternating = linear.weight.view(groups, -1, linear.in_features)
    parts = list(alternating.split([width // groups for width in linear.widths], 1))
    for position, (a, b) in pairs.items():
        parts[position] = parts[position] + 3.0 * (b @ a).view(groups, -1, linear.in_features)
    return torch.cat(parts, 1).flatten(0, 1)


def individual(linears):
    """Leaves with the values of every factor."""
    return [
        [factor.detach().clone().requires_grad_() for each in linear.adapters for factor in (each.a, each.b)]
        for linear in linears
    ]


def flattened(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def agree(ours, expected, linears, x, dy):
    """Whether output and gradients of `ours(x)` are those of `expected(x, factors)`."""
    y = ours(x)
    mine = torch.autograd.grad(y, [x, *(factor for linear in linears for factor in linear.factors)], dy)
    leaves = individual(linears)
    right = expected(x, leaves)
    true = torch.autograd.grad(right, [x, *(leaf for each in leaves for leaf in each)], dy)
    flat = flattened(mine[1:]).split([leaf.numel() for each in leaves for leaf in each])
    for got, wanted in zip((y, mine[0], *flat), (right, *true), strict=True):
        # Rounding of sums in float32 is far below.
        assert (got.flatten() - wanted.flatten()).norm() <= 1e-5 * wanted.norm()


def check_linear(ops, positions, rank, joined, tokens):
    linear = framed(24, (70, 9, 11), positions, rank, joined)
    linear.use(ops)
    assert linear.thin is not None
    x, dy = torch.randn(tokens, 24, requires_grad=True), torch.randn(tokens, 90)
    agree(linear, lambda x, leaves: x @ merged(linear, leaves[0]).t(), [linear], x, dy)


def check_alternating(ops):
    linear = framed(24, (40, 20, 20), (0, 2), 4, joined=True, groups=4)
    linear.use(ops)
    x, dy = torch.randn(9, 24, requires_grad=True), torch.randn(9, 80)
    agree(linear, lambda x, leaves: x @ merged(linear, leaves[0]).t(), [linear], x, dy)


def gated(gate_up, a):
    gate, up = gate_up.chunk(2, 1)
    act = functional.silu(gate) * up
    return torch.cat([act, act @ a.t()], 1)


def check_mlp(ops, positions, rank, joined, tokens):
    gate_up, down = framed(12, (150, 150), positions, rank, joined), framed(150, (12,), (0,), rank, joined)
    gate_up.use(ops)
    down.use(ops)

    def by_definition(x, leaves):
        gate, up = (x @ merged(gate_up, leaves[0]).t()).chunk(2, 1)
        return (functional.silu(gate) * up) @ merged(down, leaves[1]).t()

    def never(*_):
        raise AssertionError("the operation of wide frames")

    x, dy = torch.randn(tokens, 12, requires_grad=True), torch.randn(tokens, 12)
    plain = GatedOps(gated, never)
    agree(lambda x: gated_mlp(x, gate_up, down, plain), by_definition, [gate_up, down], x, dy)


def check_other_programs(ops):
    """Results are the same however many programs share the tokens, of which some may have none."""
    from lora_suite.train.fast import thin_kernels as kernels

    before = dict(kernels.TILES)
    for programs in (1, 5, 40):
        for columns, tiles in before.items():
            pull, in_place = (
                each._replace(tile=each.tile._replace(features=64), programs=programs)
                for each in (tiles.pull, tiles.in_place)
            )
            kernels.TILES[columns] = tiles._replace(pull=pull, in_place=in_place)
        check_linear(ops, (0, 2), 8, True, 150)
        check_mlp(ops, (0, 1), 8, True, 150)
    kernels.TILES.update(before)


def in_interpreter():
    ops = thin_ops()
    torch.manual_seed(0)
    check_linear(ops, (0, 1, 2), 3, True, 70)
    check_linear(ops, (0, 2), 8, False, 5)
    check_linear(ops, (0, 1, 2), 8, True, 20)
    check_alternating(ops)
    check_mlp(ops, (0, 1), 8, True, 70)
    check_mlp(ops, (1,), 20, False, 300)
    check_other_programs(ops)
    print("equal")


@pytest.mark.slow
def test_kernels_by_the_interpreter():
    check_in_interpreter("from tests.train.fast.test_thin import in_interpreter as check; check()")


def test_programs_are_shared_out_among_blocks_of_features():
    pytest.importorskip("triton")
    from lora_suite.train.fast.thin_kernels import Pull, Tile, _chunks

    by = Pull(Tile(64, 256, 8, 2), 264)
    assert _chunks(28672, by) == 2  # 112 blocks
    assert _chunks(6144, by) == 11  # 24 blocks
    assert _chunks(256, by) == 16  # no more parts than that
    assert _chunks(1 << 20, by) == 1  # each block of features has one


def test_float64_keeps_to_matrix_products():
    linear = framed(6, (40,), (0,), 2, joined=False).double()
    linear.use(ThinOps(*3 * (lambda *_: None,)))
    assert linear.thin is None


def test_a_frame_of_many_columns_keeps_to_matrix_products():
    linear = framed(6, (40,), (0,), THIN + 1, joined=False)
    linear.use(ThinOps(*3 * (lambda *_: None,)))
    assert linear.thin is None


@pytest.mark.parametrize("joined", [True, False])
def test_factors_as_one_parameter_get_the_same_gradients(joined):
    torch.manual_seed(0)
    linear = framed(6, (5, 4), (0, 1), 2, joined)
    assert len(linear.factors) == (1 if joined else 4)
    x, dy = torch.randn(7, 6, requires_grad=True), torch.randn(7, 9)
    agree(linear, lambda x, leaves: x @ merged(linear, leaves[0]).t(), [linear], x, dy)
