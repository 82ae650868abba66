# SPDX-License-Identifier: Apache-2.0
"""The LoRA operation against the formula written out in float64, and against plain PyTorch in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from lora_suite.train.lora.operation import Part, adapted_linears

INPUTS, RANK, SCALE, P = 12, 3, 2.5, 0.4
# One linear alone, gate and up, and q, k, v with fewer key heads.
GROUPS = {"alone": (10,), "gate_up": (16, 16), "qkv": (16, 8, 8)}
Tensors = dict[str, torch.Tensor]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Case:
    """Everything an operation reads, for linears of these widths; `like` gives leaves of some dtype."""

    def __init__(self, widths: Sequence[int], dropout: str = "none", bias: bool = True, tokens: int = 7):
        n = range(len(widths))
        self.widths = widths
        self.values = {"x": drawn(0, 2, tokens, INPUTS)}
        self.frozen: Tensors = {}
        for i in n:
            self.values[f"a{i}"] = drawn(10 + i, RANK, INPUTS)
            self.values[f"b{i}"] = drawn(20 + i, widths[i], RANK)
            self.frozen[f"w{i}"] = drawn(30 + i, widths[i], INPUTS)
            if bias:
                self.frozen[f"bias{i}"] = drawn(40 + i, widths[i])
        keeps = [drawn(50 + i, 2, tokens, INPUTS if dropout == "pre" else widths[i]) > -0.3 for i in n]
        self.keep_inputs = keeps if dropout == "pre" else [None for _ in n]
        self.keep_outputs = keeps if dropout == "post" else [None for _ in n]
        self.scale = SCALE / (1 - P) if dropout != "none" else SCALE
        self.dys = [drawn(60 + i, 2, tokens, widths[i]) for i in n]

    def leaves(self, dtype: torch.dtype) -> Tensors:
        return {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.values.items()}

    def constants(self, dtype: torch.dtype) -> Tensors:
        return {name: value.to(dtype, copy=True) for name, value in self.frozen.items()}

    def backward(self, outputs: Sequence[torch.Tensor]) -> None:
        dys = [dy.to(y.dtype) for dy, y in zip(self.dys, outputs, strict=True)]
        torch.autograd.backward(list(outputs), dys)


def formula(case: Case, leaves: Tensors, frozen: Tensors) -> list[torch.Tensor]:
    """The definition, a linear at a time, by autograd."""
    outputs = []
    for i in range(len(case.widths)):
        keep_input, keep_output = case.keep_inputs[i], case.keep_outputs[i]
        read = leaves["x"] if keep_input is None else leaves["x"] * keep_input
        update = functional.linear(functional.linear(read, leaves[f"a{i}"]), leaves[f"b{i}"]) * case.scale
        update = update if keep_output is None else update * keep_output
        outputs.append(functional.linear(leaves["x"], frozen[f"w{i}"], frozen.get(f"bias{i}")) + update)
    return outputs


def operation(case: Case, leaves: Tensors, frozen: Tensors, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    n = range(len(case.widths))
    a = kwargs.pop("a", None)
    a = a if a is not None else torch.cat([leaves[f"a{i}"] for i in n])
    parts = [
        Part(
            frozen[f"w{i}"],
            frozen.get(f"bias{i}"),
            leaves[f"b{i}"],
            case.keep_inputs[i],
            case.keep_outputs[i],
        )
        for i in n
    ]
    return adapted_linears(leaves["x"], a, parts, case.scale, **kwargs)


def results(case: Case, how: Any, dtype: torch.dtype) -> Tensors:
    """Outputs and gradients by name."""
    leaves = case.leaves(dtype)
    outputs = how(case, leaves, case.constants(dtype))
    case.backward(outputs)
    found = {f"y{i}": y.detach() for i, y in enumerate(outputs)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = leaf.grad
    return found


@pytest.mark.parametrize("dropout", ["none", "pre", "post"])
@pytest.mark.parametrize("widths", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_all_gradients_are_those_of_the_formula(widths: Any, dropout: str, bias: bool) -> None:
    case = Case(widths, dropout, bias)
    expected, found = (results(case, how, torch.float64) for how in (formula, operation))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dropout", ["none", "pre", "post"])
def test_gradients_are_those_of_finite_differences(dropout: str) -> None:
    case = Case(GROUPS["qkv"], dropout, tokens=2)
    leaves, frozen = case.leaves(torch.float64), case.constants(torch.float64)
    names = list(leaves)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return operation(case, dict(zip(names, values, strict=True)), frozen)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("dropout", ["none", "pre", "post"])
@pytest.mark.parametrize("widths", GROUPS.values(), ids=GROUPS)
def test_micro_batches_add_up_in_the_given_buffers(widths: Any, dropout: str) -> None:
    """Gradients go straight into views of one flat buffer, as the bank keeps them."""
    case = Case(widths, dropout)
    n = len(widths)
    leaves, frozen = case.leaves(torch.float64), case.constants(torch.float64)
    a = torch.cat([leaves[f"a{i}"].detach() for i in range(n)]).requires_grad_()
    factors = [a, *(leaves[f"b{i}"] for i in range(n))]
    flat = torch.zeros(sum(factor.numel() for factor in factors), dtype=torch.float64)
    for factor, view in zip(factors, flat.split([f.numel() for f in factors]), strict=True):
        factor.grad = view.view_as(factor)
    for _ in range(3):
        case.backward(operation(case, leaves, frozen, a=a, accumulate=True))
    expected = results(case, formula, torch.float64)
    once = [torch.cat([expected[f"da{i}"] for i in range(n)]), *(expected[f"db{i}"] for i in range(n))]
    torch.testing.assert_close(flat, 3 * torch.cat([each.flatten() for each in once]), rtol=1e-12, atol=1e-12)
    assert leaves["x"].grad is not None
    torch.testing.assert_close(leaves["x"].grad, 3 * expected["dx"], rtol=1e-12, atol=1e-12)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(word in func.__name__ for word in ("mm", "matmul"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen_leaves", "products"),
    [
        # q, k, v: dB of each, u of each, dy·W of each, u·A, uᵀ·x.
        ((), 3 + 3 + 3 + 1 + 1),
        # The first layer: neither the base's nor the adapter's part of dx.
        (("x",), 3 + 3 + 1),
        (("a",), 3 + 3 + 3 + 1),
        (("x", "a"), 3),
        (("b0", "b1", "b2"), 3 + 3 + 1 + 1),
        (("x", "b0"), 2 + 3 + 1),
    ],
)
def test_nothing_is_computed_for_what_needs_no_gradient(frozen_leaves: Any, products: int) -> None:
    case = Case(GROUPS["qkv"])
    leaves = case.leaves(torch.float64)
    leaves["a"] = torch.cat([leaves[f"a{i}"].detach() for i in range(3)]).requires_grad_()
    for name in frozen_leaves:
        leaves[name].requires_grad_(False)
    outputs = operation(case, leaves, case.constants(torch.float64), a=leaves["a"])
    with Products() as counted:
        case.backward(outputs)
    assert counted.count == products
    expected = results(case, formula, torch.float64)
    expected["da"] = torch.cat([expected[f"da{i}"] for i in range(3)])
    for name in ("x", "a", "b0", "b1", "b2"):
        gradient = leaves[name].grad
        if name in frozen_leaves:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, expected[f"d{name}"], rtol=1e-12, atol=1e-12)


def test_forward_and_backward_are_as_many_products_as_the_formula_needs() -> None:
    case = Case(GROUPS["qkv"], bias=False)
    leaves = case.leaves(torch.float64)
    a = torch.cat([leaves[f"a{i}"].detach() for i in range(3)]).requires_grad_()
    with Products() as counted:
        operation(case, leaves, case.constants(torch.float64), a=a)
    # One x·Aᵀ for all, then a linear and an adapter each; a linear at a time it would be nine.
    assert counted.count == 1 + 3 + 3


@pytest.mark.parametrize("widths", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("dropout", ["none", "pre", "post"])
def test_bfloat16_is_at_most_twice_as_far_off_as_plain_pytorch(widths: Any, dropout: str) -> None:
    """Errors are against float64 on the same rounded numbers."""
    case = Case(widths, dropout, tokens=64)
    for values in (case.values, case.frozen):
        for name, value in values.items():
            values[name] = value.bfloat16().double()
    case.dys = [dy.bfloat16().double() for dy in case.dys]
    exact = results(case, formula, torch.float64)
    plain, ours = (results(case, how, torch.bfloat16) for how in (formula, operation))

    def error(found: Tensors, name: str) -> float:
        return float((found[name].double() - exact[name]).norm() / exact[name].norm())

    for name in exact:
        assert error(plain, name) > 0, f"{name} is exact: nothing is compared"
        assert error(ours, name) <= 2 * error(plain, name), name


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "accumulated"])
@pytest.mark.parametrize("dropout", ["none", "pre", "post"])
def test_it_compiles_as_one_graph(dropout: str, accumulate: bool) -> None:
    case = Case(GROUPS["gate_up"], dropout)
    expected = results(case, formula, torch.float64)
    leaves, frozen = case.leaves(torch.float64), case.constants(torch.float64)
    a = torch.cat([leaves[f"a{i}"].detach() for i in range(2)]).requires_grad_()
    for factor in (a, leaves["b0"], leaves["b1"]):
        factor.grad = torch.zeros_like(factor)
    torch._dynamo.reset()
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        outputs = compiled(case, leaves, frozen, a=a, accumulate=accumulate)
        case.backward(outputs)
    for i in range(2):
        torch.testing.assert_close(outputs[i], expected[f"y{i}"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(leaves[f"b{i}"].grad, 2 * expected[f"db{i}"], rtol=1e-12, atol=1e-12)
    both = torch.cat([expected["da0"], expected["da1"]])
    torch.testing.assert_close(a.grad, 2 * both, rtol=1e-12, atol=1e-12)


def test_a_weight_that_trains_is_refused() -> None:
    case = Case(GROUPS["alone"])
    frozen = case.constants(torch.float64)
    frozen["w0"].requires_grad_()
    with pytest.raises(ValueError, match="frozen"):
        operation(case, case.leaves(torch.float64), frozen)


def test_accumulating_needs_somewhere_to_add_to() -> None:
    case = Case(GROUPS["alone"])
    leaves, frozen = case.leaves(torch.float64), case.constants(torch.float64)
    with pytest.raises(ValueError, match=r"\.grad"):
        operation(case, leaves, frozen, a=leaves["a0"], accumulate=True)
