# SPDX-License-Identifier: Apache-2.0
"""The loss is a mean over the global batch's tokens, never a mean of means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lora_suite.train.batch import IGNORED
from lora_suite.train.token_loss import token_loss_sum
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
