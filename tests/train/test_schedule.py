# SPDX-License-Identifier: Apache-2.0
"""Learning rates by hand."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from lora_suite.config.schema import Scheduler
from lora_suite.train.schedule import learning_rate, peak_learning_rate
from tests.train.conftest import small_recipe


def scheduler(
    decay: Literal["constant", "linear", "cosine"], warmup: int = 0, end: int | None = None, low: float = 0.0
) -> Scheduler:
    return Scheduler(decay=decay, warmup_steps=warmup, decay_steps=end, min_lr_ratio=low)


def rates(how: Scheduler, steps: int) -> list[float]:
    return [learning_rate(step, 1.0, how, steps) for step in range(1, steps + 1)]


def test_warm_up_is_a_line_whose_last_step_has_the_peak() -> None:
    assert rates(scheduler("constant", warmup=4), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_the_last_step() -> None:
    assert rates(scheduler("linear"), 4) == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert rates(scheduler("linear", warmup=2, low=0.2), 4) == pytest.approx([0.5, 1.0, 0.6, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    assert rates(scheduler("cosine", low=0.1), 4) == pytest.approx(
        [0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1]
    )


def test_after_decay_steps_the_rate_stays() -> None:
    assert rates(scheduler("linear", end=2, low=0.5), 4) == pytest.approx([0.75, 0.5, 0.5, 0.5])
    assert rates(scheduler("linear", warmup=3, end=2, low=0.5), 4) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5])


def test_each_backend_has_its_own_key() -> None:
    keys = ("policy.optimizer.kwargs.lr=0.25", "policy.megatron_cfg.optimizer.lr=0.5")
    assert peak_learning_rate(small_recipe(*keys)) == 0.25
    megatron = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    assert peak_learning_rate(small_recipe(*keys, *megatron)) == 0.5
