# SPDX-License-Identifier: Apache-2.0
"""LoRA on both backends is one training: the same curves over twenty steps, in training and validation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_suite.train.program import build_backend
from tests.train.conftest import Run

STEPS = 20
# float32 sums in another order; at step 1 they differ by 1e-7, and Adam carries that on.
TOLERANCE = 2e-5
COMMON = (
    "policy.precision=float32",
    "policy.optimizer.kwargs.lr=3e-3",
    f"sft.max_num_steps={STEPS}",
    "sft.val_period=10",
    "sft.val_at_start=true",
)
DTENSOR = ("policy.dtensor_cfg.lora_cfg.enabled=true",)
MEGATRON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.lora_cfg.enabled=true",
)
FUSED = (*MEGATRON, "policy.megatron_cfg.lora_cfg.fused=true")


@pytest.mark.train
@pytest.mark.slow
def test_lora_trains_alike_on_both_backends_and_another_way_of_adapting_does_not(
    new_run: Callable[[str], Run],
) -> None:
    from megatron.core import parallel_state

    runs = {}
    for name, arm in (("dtensor", DTENSOR), ("megatron", MEGATRON), ("fused", FUSED)):
        runs[name] = new_run(name)
        assert runs[name].train(*COMMON, *arm, backend=build_backend) == 0
        assert not [each for each in runs[name].record.invariants if each.ok is False]
        parallel_state.destroy_model_parallel()
    ours, theirs, fused = (runs[name].metrics for name in ("dtensor", "megatron", "fused"))
    for name, steps in (("train/loss", STEPS), ("train/grad_norm", STEPS), ("validation/loss", 3)):
        assert len(ours[name]) == steps
        assert theirs[name] == {
            step: pytest.approx(value, rel=TOLERANCE) for step, value in ours[name].items()
        }
    assert ours["train/loss"]["20"] < 0.95 * ours["train/loss"]["1"]
    assert ours["lora/trainable_params"]["1"] == theirs["lora/trainable_params"]["1"] == 16_384
    # Adapters that share A are another model from the second step on: more than the tolerance apart.
    assert fused["lora/trainable_params"]["1"] == 13_312
    assert fused["train/loss"]["1"] == pytest.approx(ours["train/loss"]["1"], rel=TOLERANCE)
    for name in ("train/loss", "validation/loss"):
        assert fused[name]["20"] != pytest.approx(ours[name]["20"], rel=10 * TOLERANCE)
