# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every step: one rule for both backends, so that their curves can be compared."""

from __future__ import annotations

import math

from lora_suite.config.schema import Recipe, Scheduler


def peak_learning_rate(recipe: Recipe) -> float:
    """Where warm-up leads to: each backend has its own key for it, as in the field's recipes."""
    policy = recipe.policy
    return policy.optimizer.kwargs.lr if policy.backend == "dtensor" else policy.megatron_cfg.optimizer.lr


def learning_rate(step: int, peak: float, scheduler: Scheduler, max_steps: int) -> float:
    """Learning rate of a step (1-based).

    Warm-up of W steps: peak · step / W, so step W has the peak. Then constant, or down to
    peak · min_lr_ratio at step `decay_steps` (None: `max_steps`), in a line or in half a cosine, and constant
    from there on.
    """
    warmup = scheduler.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if scheduler.decay == "constant":
        return peak
    end = scheduler.decay_steps or max_steps
    done = min((step - warmup) / (end - warmup), 1.0) if end > warmup else 1.0
    share = 1.0 - done if scheduler.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (scheduler.min_lr_ratio + (1.0 - scheduler.min_lr_ratio) * share)
