# SPDX-License-Identifier: Apache-2.0
"""Masters kept as bfloat16 weights and what these lack, against torch's AdamW on float32 tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_suite.config.schema import Optimizer, OptimizerKwargs
from lora_suite.train.fast.masters import MasterWeights, WholeWeights, join, remainder_of
from lora_suite.train.topology import Axis, Topology

ALONE = Topology(0, 1, torch.device("cpu"), Axis(0, 1), Axis(0, 1), Axis(0, 1))
STEPS = 50


def optimizer(name):
    kwargs = OptimizerKwargs(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-8, foreach=None, fused=None)
    return Optimizer(name=f"torch.optim.{name}", kwargs=kwargs)


def test_a_weight_and_its_remainder_are_the_master():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    masters = bits.view(torch.float32)
    # Weights that bfloat16 cannot hold are no masters of a training that goes well.
    masters = masters[masters.bfloat16().isfinite()]
    weights = masters.bfloat16()
    again = join(weights, remainder_of(masters, weights))
    halfway = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(again[~halfway], masters[~halfway])
    assert 0 <= (masters.view(torch.int32) - again.view(torch.int32)).max() <= 1


@pytest.mark.parametrize(
    ("bits", "kept"),
    # Halfway from an even weight to the next is rounded down to it, from an odd one up; -0x407F8000 are
    # the bits of the first, negated.
    [(0x3F808000, 0x3F807FFF), (0x3F818000, 0x3F818000), (-0x407F8000, -0x407F8000 - 1)],
)
def test_halfway_between_two_weights(bits, kept):
    master = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    weight = master.bfloat16()
    again = join(weight, remainder_of(master, weight))
    assert again.view(torch.int32).item() == kept
    assert torch.equal(again.bfloat16(), weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value):
    for pattern in (torch.tensor([value]), torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)):
        weight = pattern.bfloat16()
        assert not join(weight, remainder_of(pattern, weight)).isfinite().any()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_bfloat16_weights_train_as_float32_masters_do(name):
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(size, generator=generator).bfloat16() for size in ((40, 30), (50,))]
    parameters = [nn.Parameter(value.clone()) for value in first]
    masters = [nn.Parameter(value.float()) for value in first]
    ours = MasterWeights(WholeWeights(parameters, []), ALONE, optimizer(name), compiled=False)
    theirs = getattr(torch.optim, name)(masters, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-8)
    for _ in range(STEPS):
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            master.grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
        assert ours.clip_gradients(1.0).item() == pytest.approx(norm.item(), rel=1e-5)
        ours.step(1e-3)
        theirs.step()
    remainders = ours.state_dict()["remainders"]
    for parameter, remainder, master, start in zip(parameters, remainders, masters, first, strict=True):
        kept = join(parameter.detach(), remainder)
        assert torch.equal(kept.bfloat16(), parameter)
        moved = (master - start.float()).norm()
        assert (kept - master).norm() < 1e-4 * moved
        # Weights updated in bfloat16 would have lost most of it.
        assert (parameter.float() - master).norm() > 1e-2 * moved


def test_sgd_without_moments_keeps_updates_that_bfloat16_would_lose():
    """Against torch's SGD on float32 tensors; a bfloat16 weight of 1 has no neighbour nearer than 2^-8."""
    generator = torch.Generator().manual_seed(0)
    first = (1.0 + torch.rand(40, 30, generator=generator)).bfloat16()
    parameter, master = nn.Parameter(first.clone()), nn.Parameter(first.float())
    ours = MasterWeights(WholeWeights([parameter], []), ALONE, optimizer("SGD"), compiled=False)
    theirs = torch.optim.SGD([master], lr=1e-3, weight_decay=0.1)
    for _ in range(STEPS):
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        master.grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_([master], 1.0)
        assert ours.clip_gradients(1.0).item() == pytest.approx(norm.item(), rel=1e-5)
        ours.step(1e-3)
        theirs.step()
    state = ours.state_dict()
    assert state["moments"] == {}
    kept = join(parameter.detach(), state["remainders"][0])
    # A step is far below what a bfloat16 weight can show, the sum of fifty is not.
    moved = (master - first.float()).abs()
    assert 0.0 < (moved / STEPS).max() < 2**-9
    torch.testing.assert_close(kept, master.detach(), rtol=1e-6, atol=0.0)


def test_a_checkpoint_of_another_optimizer_is_named():
    kept, other = (
        MasterWeights(
            WholeWeights([nn.Parameter(torch.zeros(3))], []), ALONE, optimizer(name), compiled=False
        )
        for name in ("SGD", "AdamW")
    )
    with pytest.raises(KeyError, match=r"policy\.optimizer\.name"):
        other.load_state_dict(kept.state_dict())


@pytest.mark.parametrize("other", [{"weights": [torch.zeros(3)]}, {"parameters": {}}], ids=["dtype", "path"])
def test_a_checkpoint_of_another_precision_or_path_is_named(other):
    weights = WholeWeights([nn.Parameter(torch.zeros(3).bfloat16())], [])
    masters = MasterWeights(weights, ALONE, optimizer("AdamW"), compiled=False)
    with pytest.raises(KeyError, match="fast_path"):
        masters.load_state_dict(other)
