# SPDX-License-Identifier: Apache-2.0
"""The LoRA operation against float64 formulas, and its tensor parallel placements against the whole."""

from __future__ import annotations

import pytest
import torch

from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.topology import Axis
from tests.train.lora.adapters import bank_of, shards, spec, topology

INPUTS, OUTPUTS, SCALE = 6, 8, 2.0


def input_tensor(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, INPUTS, generator=generator, dtype=torch.float64)


def backward(y: torch.Tensor, gradient: torch.Tensor) -> None:
    y.backward(gradient)  # type: ignore[no-untyped-call]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_forward_and_backward_by_the_formulas() -> None:
    adapter = Adapter("q", INPUTS, OUTPUTS, spec())
    bank = bank_of([adapter])
    x = input_tensor().requires_grad_()
    y = adapter(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    backward(y, dy)

    a, b = adapter.a.detach(), adapter.b.detach()
    rows, drows = x.detach().reshape(-1, INPUTS), dy.reshape(-1, OUTPUTS)
    torch.testing.assert_close(y.detach().reshape(-1, OUTPUTS), SCALE * rows @ a.T @ b.T)
    # dB = s dyᵀ(x Aᵀ), dA = s (dy B)ᵀ x, dx = s dy B A
    torch.testing.assert_close(adapter.b.grad, SCALE * drows.T @ (rows @ a.T))
    torch.testing.assert_close(adapter.a.grad, SCALE * (drows @ b).T @ rows)
    torch.testing.assert_close(gradient_of(x).reshape(-1, INPUTS), SCALE * drows @ b @ a)
    # Gradients are where the bank sums them, not in tensors of their own.
    parts = {slot.factor: bank.gradient[slot.start : slot.stop] for slot in bank.slots}
    assert torch.equal(parts["a"].view(3, INPUTS), gradient_of(adapter.a))
    assert torch.equal(parts["b"].view(OUTPUTS, 3), gradient_of(adapter.b))


def test_gradients_of_several_passes_add_up() -> None:
    adapter = Adapter("q", INPUTS, OUTPUTS, spec())
    bank = bank_of([adapter])
    for _ in range(2):
        backward(adapter(input_tensor()), torch.ones(4, 5, OUTPUTS, dtype=torch.float64))
    twice = bank.gradient.clone()
    bank.gradient.zero_()
    backward(adapter(input_tensor()), torch.ones(4, 5, OUTPUTS, dtype=torch.float64))
    torch.testing.assert_close(twice, 2 * bank.gradient)


@pytest.mark.parametrize("placement", ["column", "row"])
def test_shards_are_slices_of_the_whole_and_add_up_to_it(placement: str) -> None:
    whole = Adapter("q", INPUTS, OUTPUTS, spec())
    bank_of([whole])
    x = input_tensor().requires_grad_()
    y = whole(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    backward(y, dy)

    column = placement == "column"
    outputs, dxs, das, dbs = [], [], [], []
    for index, (adapter, _) in enumerate(shards(spec(), INPUTS, OUTPUTS, placement)):  # type: ignore[arg-type]
        part = x.detach() if column else x.detach().chunk(2, -1)[index]
        part = part.clone().requires_grad_()
        out = adapter(part)
        backward(out, dy.chunk(2, -1)[index] if column else dy)
        outputs.append(out.detach())
        dxs.append(gradient_of(part))
        das.append(gradient_of(adapter.a).clone())
        dbs.append(gradient_of(adapter.b).clone())

    joined = torch.cat(outputs, -1) if column else outputs[0] + outputs[1]
    torch.testing.assert_close(joined, y.detach())
    torch.testing.assert_close(dxs[0] + dxs[1] if column else torch.cat(dxs, -1), x.grad)
    # The replicated factor's gradient is partial on each rank: the bank sums it.
    torch.testing.assert_close(das[0] + das[1] if column else torch.cat(das, 1), whole.a.grad)
    torch.testing.assert_close(torch.cat(dbs, 0) if column else dbs[0] + dbs[1], whole.b.grad)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("placement", ["column", "row"])
def test_shards_drop_what_the_whole_drops(placement: str, position: str) -> None:
    kind = spec(dropout=0.4, dropout_position=position)
    whole = Adapter("q", INPUTS, OUTPUTS, kind)
    bank_of([whole])
    x, column = input_tensor(), placement == "column"
    sharded = shards(kind, INPUTS, OUTPUTS, placement)  # type: ignore[arg-type]
    for _ in range(2):  # the second call draws another mask, again the same one on all ranks
        parts = [
            adapter(x if column else x.chunk(2, -1)[index]) for index, (adapter, _) in enumerate(sharded)
        ]
        joined = torch.cat(parts, -1) if column else parts[0] + parts[1]
        torch.testing.assert_close(joined, whole(x))


def test_dropout_keeps_the_mean_and_stops_in_evaluation() -> None:
    kind = spec(dropout=0.9, dropout_position="pre")
    adapter = Adapter("q", INPUTS, OUTPUTS, kind)
    bank_of([adapter])
    x = input_tensor()
    assert not torch.equal(adapter(x), adapter(x))
    adapter.eval()
    expected = SCALE * x @ adapter.a.T @ adapter.b.T
    torch.testing.assert_close(adapter(x), expected)
    adapter.train()
    mean = torch.stack([adapter(x).detach() for _ in range(4000)]).mean(0)
    assert float((mean - expected.detach()).norm() / expected.detach().norm()) < 0.1


def test_post_dropout_drops_outputs_and_pre_dropout_inputs() -> None:
    ones = torch.ones(1, INPUTS, dtype=torch.float64)
    for position in ("pre", "post"):
        adapter = Adapter("q", INPUTS, OUTPUTS, spec(dropout=0.5, dropout_position=position))
        bank_of([adapter])
        zeros = sum(int((adapter(ones) == 0).sum()) for _ in range(50))
        # Dropped inputs leave an output of zero only if all six go (1 in 64); dropped outputs are zero.
        assert (zeros > 100) is (position == "post")


def test_data_parallel_ranks_draw_different_masks() -> None:
    outputs = []
    for index in range(2):
        adapter = Adapter("q", INPUTS, OUTPUTS, spec(dropout=0.5))
        bank_of([adapter], topology(dp=Axis(index, 2)))
        outputs.append(adapter(input_tensor()))
    assert not torch.equal(*outputs)


def test_a_placement_needs_its_axis() -> None:
    with pytest.raises(ValueError, match="adapter q: placement row needs the tensor-parallel axis"):
        Adapter("q", INPUTS, OUTPUTS, spec(), "row")


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_beside_a_linear_it_is_the_linear_and_what_it_adds(position: str, dropout: float) -> None:
    """Linear and adapter as one operation, against both apart, with the same masks."""
    kind = spec(dropout=dropout, dropout_position=position)
    apart, together = (Adapter("q", INPUTS, OUTPUTS, kind) for _ in range(2))
    banks = [bank_of([apart]), bank_of([together])]
    linear = torch.nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64).requires_grad_(False)
    xs = [input_tensor().requires_grad_() for _ in range(2)]
    dy = torch.randn(4, 5, OUTPUTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ys = [
        linear(xs[0]) + apart(xs[0]),
        together.beside(xs[1], linear.weight, linear.bias),
    ]
    for y in ys:
        backward(y, dy)
    torch.testing.assert_close(ys[1], ys[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(banks[1].gradient, banks[0].gradient, rtol=1e-12, atol=1e-12)
    assert bool(banks[1].gradient.any())
