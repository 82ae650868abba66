# SPDX-License-Identifier: Apache-2.0
"""Bugs that the field had with hybrid models, planted here: each turns the invariant red that is for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from lora_suite.train.backends.dtensor.backend import DTensorBackend
from lora_suite.train.topology import Axis
from tests.train.dtensor.ranks import LORA, TINY_HYBRID, Setting, run_ranks
from tests.train.dtensor.test_planted_faults import nothing, red, verdicts

PER_EXPERT = (LORA, "policy.dtensor_cfg.lora_cfg.experts=per_expert")
ALONE = Setting(PER_EXPERT, TINY_HYBRID)
Verdicts = dict[str, tuple[bool | None, str]]


def experts_bypassed(backend: DTensorBackend) -> None:
    """Stacks are multiplied without their adapters."""
    from lora_suite.train.models.nemotron_h import expert_modules

    for _, experts in expert_modules(backend.model):
        experts.adapters = torch.nn.ModuleDict()


def expert_scale_forgotten(backend: DTensorBackend) -> None:
    """What experts' adapters add is not scaled."""
    assert backend.bank is not None
    for adapter in backend.bank.adapters:
        if adapter.multiplies:
            forward = adapter.forward

            def unscaled(*arguments: Any, adapter: Any = adapter, forward: Any = forward) -> torch.Tensor:
                spec, adapter.spec = adapter.spec, replace(adapter.spec, alpha=adapter.spec.rank)
                y: torch.Tensor = forward(*arguments)
                adapter.spec = spec
                return y

            adapter.forward = unscaled  # type: ignore[method-assign]


def mixers_in_one_kernel(backend: DTensorBackend) -> None:
    """transformers' own mixers, with a kernel that reads the weight of out_proj."""
    from transformers.models.nemotron_h import modeling_nemotron_h as modeling

    from lora_suite.train.models.nemotron_h import CalledMixer

    def one_kernel(projected: torch.Tensor, *_: Any, outproj_weight: torch.Tensor, **__: Any) -> torch.Tensor:
        return functional.linear(projected[..., : outproj_weight.shape[1]], outproj_weight)

    modeling.mamba2_split_conv1d_scan_combined = one_kernel
    for module in backend.model.modules():
        if isinstance(module, CalledMixer):
            module.__class__ = modeling.NemotronHMamba2Mixer
    backend.model.train()


def on_one_rank() -> dict[str, Verdicts]:
    """The last one stays in this process."""
    faults: list[Callable[[DTensorBackend], None]] = [
        nothing,
        experts_bypassed,
        expert_scale_forgotten,
        mixers_in_one_kernel,
    ]
    found = {spoil.__name__: verdicts(ALONE, spoil) for spoil in faults}
    return found | {"called": verdicts(ALONE, nothing)}


def test_what_bypasses_an_adapter_is_named(tmp_path):
    """Also that ours never asks the kernel which would."""
    (found,) = run_ranks(1, tmp_path / "ranks", on_one_rank)
    assert red(found["nothing"]) == red(found["called"]) == []
    bypassed = found["experts_bypassed"]
    assert {"b_gradients_step1", "a_gradients_step2"} <= set(red(bypassed))
    assert "model.layers.1.mixer.experts.down_proj.b" in bypassed["b_gradients_step1"][1]
    assert red(found["expert_scale_forgotten"]) == ["adapter_formula"]
    assert "experts.up_proj adds 0.25 times" in found["expert_scale_forgotten"]["adapter_formula"][1]
    fused = found["mixers_in_one_kernel"]
    assert "model.layers.0.mixer.out_proj.b, model.layers.3.mixer.out_proj.b" in fused["b_gradients_step1"][1]


def same_experts_not_summed(backend: DTensorBackend) -> None:
    """Ranks that hold the same experts keep their own gradients of them."""
    assert backend.bank is not None
    backend.bank.topology = replace(backend.bank.topology, edp=Axis(0, 1))


def on_four_ranks() -> dict[str, Verdicts]:
    split = Setting((*PER_EXPERT, "policy.dtensor_cfg.expert_parallel_size=2"), TINY_HYBRID, world=4)
    return {spoil.__name__: verdicts(split, spoil) for spoil in (nothing, same_experts_not_summed)}


@pytest.mark.slow
def test_a_sum_over_the_ranks_of_an_expert_that_is_left_out_is_seen(tmp_path):
    for found in run_ranks(4, tmp_path / "ranks", on_four_ranks):
        assert red(found["nothing"]) == []
        assert red(found["same_experts_not_summed"]) == ["replicas_equal"]
        message = found["same_experts_not_summed"]["replicas_equal"][1]
        assert message.endswith("ranks of expert part 0, ranks of expert part 1")
