# SPDX-License-Identifier: Apache-2.0
"""The gated MLP with kernels, by the formulas: in float64 with stand-ins for the kernels, and the kernels."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch.nn import functional

from lora_suite.train.fast.linears import FramedLinear, StackedLinear, refresh
from lora_suite.train.fast.mlp import GatedOps, gated_mlp, kernel_ops
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.spec import LoraSpec
from tests.train.fast.interpreter import check_in_interpreter

HIDDEN, WIDTH, TOKENS = 6, 10, 7
CPU = torch.device("cpu")
SPEC = LoraSpec(
    rank=3, alpha=6.0, dropout=0.0, dropout_position="pre", a_init="xavier", b_init="zero", dtype=None, seed=0
)


def gated(gate_up, a):
    gate, up = gate_up.chunk(2, 1)
    act = functional.silu(gate) * up
    return torch.cat([act, act @ a.t()], 1)


def gated_backward(gate_up, d_act, b, recompute):
    leaf = gate_up.detach().requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, 1)
        act = functional.silu(gate) * up
        act.backward(d_act)
    return torch.cat([leaf.grad, leaf.grad @ b], 1), act.detach()[: None if recompute else 0]


OPS = GatedOps(gated, gated_backward)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def adapter(name, inputs, outputs):
    made = Adapter(name, inputs, outputs, SPEC)
    made.a, made.b = torch.nn.Parameter(random(3, inputs)), torch.nn.Parameter(random(outputs, 3))
    return made


def framed(inputs, widths, positions):
    adapters = {position: adapter(f"{inputs}.{position}", inputs, widths[position]) for position in positions}
    linear = FramedLinear(inputs, widths, False, adapters, torch.float64, CPU)
    linear.weight.copy_(random(sum(widths), inputs).detach())
    return linear


def merged(linear):
    """W + s·B·A of the whole stack, differentiable by the factors."""
    whole = []
    for position, part in enumerate(linear.parts("weight")):
        ours = linear.by_position.get(position)
        whole.append(part if ours is None else part + SPEC.scale * ours.b @ ours.a)
    return torch.cat(whole)


@pytest.mark.parametrize("positions", [(0, 1), (1,)], ids=["gate-and-up", "up-alone"])
@pytest.mark.parametrize("ops", [OPS, None], ids=["kernels", "plain"])
def test_framed_mlp_and_its_gradients(positions, ops):
    torch.manual_seed(0)
    gate_up, down = framed(HIDDEN, (WIDTH, WIDTH), positions), framed(WIDTH, (HIDDEN,), (0,))
    refresh([gate_up, down])
    x, dy = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN).detach()
    factors = [*gate_up.factors, *down.factors]
    y = gated_mlp(x, gate_up, down, ops)
    ours = torch.autograd.grad(y, [x, *factors], dy)
    gate, up = (x @ merged(gate_up).t()).chunk(2, 1)
    expected = (functional.silu(gate) * up) @ merged(down).t()
    torch.testing.assert_close(y, expected)
    for mine, right in zip(ours, torch.autograd.grad(expected, [x, *factors], dy), strict=True):
        torch.testing.assert_close(mine, right)


def test_no_gradient_is_computed_for_an_input_that_needs_none():
    torch.manual_seed(0)
    gate_up, down = framed(HIDDEN, (WIDTH, WIDTH), (0, 1)), framed(WIDTH, (HIDDEN,), (0,))
    refresh([gate_up, down])
    y = gated_mlp(random(TOKENS, HIDDEN).detach(), gate_up, down, OPS)
    assert all(gradient is not None for gradient in torch.autograd.grad(y.sum(), gate_up.factors))


def test_stacked_mlp_and_its_gradients():
    torch.manual_seed(0)
    gate_up = StackedLinear(HIDDEN, (WIDTH, WIDTH), False, torch.float64, CPU)
    down = StackedLinear(WIDTH, (HIDDEN,), False, torch.float64, CPU)
    with torch.no_grad():
        gate_up.weight.normal_()
        down.weight.normal_()
    x, dy = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN).detach()
    inputs = [x, gate_up.weight, down.weight]
    results = [
        (y, torch.autograd.grad(y, inputs, dy))
        for y in (gated_mlp(x, gate_up, down, OPS), gated_mlp(x, gate_up, down, None))
    ]
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.slow
def test_kernels_by_the_interpreter():
    """On a CPU, Triton's interpreter runs the kernels; its switch must be set before Triton is imported."""
    script = """
        import torch
        from lora_suite.train.fast import kernels
        from tests.train.fast.test_mlp import gated, gated_backward

        torch.manual_seed(0)
        for tokens, width, rank in ((5, 24, 8), (3, 2100, 0)):
            wide = torch.randn(tokens, 2 * width + 4)
            gate_up, d_act = wide[:, : 2 * width], torch.randn(tokens, width + 3)[:, :width]
            a, b = torch.randn(rank, width), torch.randn(2 * width, rank)
            torch.testing.assert_close(kernels.gated(gate_up, a), gated(gate_up, a), rtol=1e-4, atol=1e-4)
            for recompute in (False, True):
                given = (gate_up, d_act, b, recompute)
                backward = kernels.gated_backward(*given), gated_backward(*given)
                torch.testing.assert_close(*backward, rtol=1e-4, atol=1e-4)
                again = backward[0][1]
                assert torch.equal(again, kernels.gated(gate_up, a[:0])[: len(again)])
        print("equal")
    """
    check_in_interpreter(textwrap.dedent(script), seconds=120)


def test_kernels_that_compute_in_float32_leave_float64_alone():
    assert kernel_ops(torch.float64) is None
