# SPDX-License-Identifier: Apache-2.0
"""Routed experts against one token at a time, by autograd, in float64."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.fast.experts import FramedExperts, StackedExperts, route, routed_mlp
from lora_suite.train.lora.experts import ExpertAdapter
from tests.train.lora.adapters import bank_of, spec

TOKENS, CHOICES, EXPERTS, FEATURES, HIDDEN = 7, 2, 5, 6, 4
CPU = torch.device("cpu")
KIND = spec(rank=3, alpha=6.0, b_init="normal")


def draw(*size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def chosen():
    """Experts of each token, all different; nobody asks for expert 3."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.tensor([0, 1, 2, 4])
    return torch.stack([kept[torch.randperm(4, generator=generator)[:CHOICES]] for _ in range(TOKENS)])


def linears(adapted):
    made = []
    adapters = [
        ExpertAdapter("up", FEATURES, HIDDEN, KIND, EXPERTS, "loop"),
        ExpertAdapter("down", HIDDEN, FEATURES, KIND, EXPERTS, "loop"),
    ]
    bank_of(adapters)
    for adapter, inputs, out, seed in zip(
        adapters, (FEATURES, HIDDEN), (HIDDEN, FEATURES), (1, 2), strict=True
    ):
        if adapter.name in adapted:
            linear = FramedExperts(EXPERTS, inputs, out, adapter, torch.float64, CPU)
            linear.refresh()
        else:
            linear = StackedExperts(EXPERTS, inputs, out, torch.float64, CPU)
        with torch.no_grad():
            linear.weight.copy_(draw(EXPERTS, out, inputs, seed=seed))
        made.append(linear)
    return made


def whole(linear):
    """The weights with what the adapter adds, of leaves that gradients can be had of."""
    leaves = [linear.weight.detach().clone().requires_grad_()]
    if isinstance(linear, StackedExperts):
        return leaves[0], leaves
    leaves = [factor.detach().clone().requires_grad_() for factor in (linear.adapter.a, linear.adapter.b)]
    return linear.weight + KIND.scale * (leaves[1] @ leaves[0]), leaves


def one_by_one(x, weights, up, down):
    rows = []
    for token, experts in enumerate(chosen().tolist()):
        parts = [
            weight * (down[expert] @ (up[expert] @ x[token]).relu().square())
            for weight, expert in zip(weights[token], experts, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("adapted", [(), ("up", "down"), ("up",), ("down",)], ids=str)
def test_rows_go_through_their_experts(adapted):
    up, down = linears(adapted)
    x = draw(TOKENS, FEATURES, seed=3).requires_grad_()
    weights = draw(TOKENS, CHOICES, seed=4).abs().requires_grad_()
    dy = draw(TOKENS, FEATURES, seed=5)
    y = routed_mlp(x, route(chosen(), weights, EXPERTS), up, down)
    (whole_up, up_leaves), (whole_down, down_leaves) = whole(up), whole(down)
    expected = one_by_one(x, weights, whole_up, whole_down)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y, [x, weights, *up.trained, *down.trained], dy)
    wanted = torch.autograd.grad(expected, [x, weights, *up_leaves, *down_leaves], dy)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("adapted", [(), ("up", "down")], ids=["weights", "adapters"])
def test_parts_of_the_experts_add_up_to_all(adapted):
    """A rank that has some experts gives their part of every sum; 5 experts are 2 and 3."""
    up, down = linears(adapted)
    x = draw(TOKENS, FEATURES, seed=3).requires_grad_()
    weights = draw(TOKENS, CHOICES, seed=4).abs().requires_grad_()
    dy = draw(TOKENS, FEATURES, seed=5)
    leaves = [x, weights, *up.trained, *down.trained]
    y = routed_mlp(x, route(chosen(), weights, EXPERTS), up, down)
    wanted = torch.autograd.grad(y, leaves, dy)
    parts, gradients = [], []
    for own in (range(2), range(2, 5)):
        part = [only(linear, own) for linear in (up, down)]
        parts.append(routed_mlp(x, route(chosen(), weights, EXPERTS, own), *part))
        gradients.append(torch.autograd.grad(parts[-1], [x, weights, *part[0].trained, *part[1].trained], dy))
    torch.testing.assert_close(sum(parts), y)
    for index, gradient in enumerate(wanted):
        found = [each[index] for each in gradients]
        torch.testing.assert_close(sum(found) if index < 2 else torch.cat(found), gradient)


def only(linear, own):
    """The same with some of its experts."""
    few = slice(own.start, own.stop)
    if isinstance(linear, StackedExperts):
        part = StackedExperts(len(own), linear.in_features, linear.out, torch.float64, CPU)
        part.weight.data = linear.weight.detach()[few].clone()
        return part
    adapter = ExpertAdapter("part", linear.in_features, linear.out, KIND, len(own), "loop")
    bank_of([adapter])
    for factor in ("a", "b"):
        getattr(adapter, factor).data.copy_(getattr(linear.adapter, factor)[few])
    part = FramedExperts(len(own), linear.in_features, linear.out, adapter, torch.float64, CPU)
    part.weight.copy_(linear.weight[few])
    part.refresh()
    return part


def test_frozen_experts_get_no_gradient():
    up, down = linears(("down",))
    up.requires_grad_(False)
    x = draw(TOKENS, FEATURES, seed=3).requires_grad_()
    weights = draw(TOKENS, CHOICES, seed=4)
    routed_mlp(x, route(chosen(), weights, EXPERTS), up, down).sum().backward()
    assert up.weight.grad is None
    assert x.grad is not None
    assert down.adapter.b.grad.any()


def test_adapters_can_be_switched_off():
    up, down = linears(("up", "down"))
    x, weights = draw(TOKENS, FEATURES, seed=3), draw(TOKENS, CHOICES, seed=4)
    for linear in (up, down):
        linear.adapter.switch(False)
    y = routed_mlp(x, route(chosen(), weights, EXPERTS), up, down)
    torch.testing.assert_close(y, one_by_one(x, weights, up.weight, down.weight))


def test_it_compiles_in_one_graph():
    up, down = linears(("up", "down"))
    x = draw(TOKENS, FEATURES, seed=3).requires_grad_()
    weights = draw(TOKENS, CHOICES, seed=4)

    def compute(x):
        return routed_mlp(x, route(chosen(), weights, EXPERTS), up, down)

    compiled = torch.compile(
        lambda x, picked, weights: routed_mlp(x, route(picked, weights, EXPERTS), up, down),
        fullgraph=True,
        backend="aot_eager",
    )
    y = compiled(x, chosen(), weights)
    torch.testing.assert_close(y, compute(x))
    factors = [*up.trained, *down.trained]
    for mine, theirs in zip(
        torch.autograd.grad(y.sum(), [x, *factors]),
        torch.autograd.grad(compute(x).sum(), [x, *factors]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
