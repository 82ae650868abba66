# SPDX-License-Identifier: Apache-2.0
"""The loss is a mean over the global batch's tokens, never a mean of means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lora_suite.train.batch import IGNORED
from lora_suite.train.loss import token_loss_sum
from tests.train.conftest import Run


def test_two_micro_batches_of_unequal_size() -> None:
    # 2 and 6 target tokens with mean losses 3.0 and 1.0: 1.5, not 2.0
    # (https://github.com/huggingface/transformers/pull/34191). Two classes; a logit gap g costs ln(1 + e^g).
    def batch(count: int, mean: float) -> tuple[torch.Tensor, torch.Tensor]:
        gap = math.log(math.expm1(mean))
        logits = torch.tensor([[[0.0, gap]] * (count + 1)], dtype=torch.float64)
        labels = torch.tensor([[0] * count + [IGNORED]])
        return logits, labels

    sums = [token_loss_sum(*batch(2, 3.0)), token_loss_sum(*batch(6, 1.0))]
    assert float(sum(sums)) / 8 == pytest.approx(1.5, rel=1e-12)


def test_a_batch_without_targets_costs_nothing_and_has_a_zero_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((2, 3), IGNORED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) == 0.0


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 64, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.arange(64)[None]
    exact = token_loss_sum(logits.double(), labels)
    assert float(token_loss_sum(logits, labels)) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize("arm", [(), ("policy.dtensor_cfg.lora_cfg.enabled=true",)])
def test_the_micro_batch_changes_neither_loss_nor_update(new_run: Any, arm: tuple[str, ...]) -> None:
    runs: list[Run] = []
    for micro in (1, 2, 4):
        runs.append(new_run(f"micro{micro}"))
        runs[-1].train(*arm, f"policy.train_micro_batch_size={micro}")
    reference = runs[0].metrics
    for run in runs[1:]:
        assert run.record.batches == runs[0].record.batches
        for name in ("train/loss", "train/grad_norm"):
            assert run.metrics[name] == {
                step: pytest.approx(value, rel=1e-9) for step, value in reference[name].items()
            }
