# SPDX-License-Identifier: Apache-2.0
"""What of a metric is worse, and which changes of it are too small to speak of.

The smallest changes and spreads are shares. They come from the noise of recorded runs: step times of large
LoRA trainings repeat within 0.02 to 0.12 % on one machine (ten runs on each of twelve systems,
mlcommons/training_results_v5.1), peak memory is flat in 69 % of Megatron-LM's golden runs, and a loss that
drifts by more than 0.2 % is more than other kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_suite.plan.metric_names import LOSS, STEP_TIME

PEAK_MEMORY = "memory/peak_allocated_gib"

# Figures of a run's summary that have a history, by the metric they summarise.
SUMMARIES = {"median_step_time": STEP_TIME, "peak_memory_gib": PEAK_MEMORY, "final_loss": LOSS}
_PHASE = "timing/train/"
_RATE = "performance/"


@dataclass(frozen=True)
class Policy:
    """How a metric's nights are judged.

    worse: 1 where more is worse, -1 where less is, 0 where every change is. smallest: change of the level,
    as a share, below which nothing is said. spread: share that the night-to-night spread is taken to be at
    least, so that a metric that never moved can still be judged.
    """

    worse: int
    smallest: float
    spread: float


_TIME = Policy(worse=1, smallest=0.01, spread=0.001)
_MEMORY = Policy(worse=1, smallest=0.005, spread=0.001)
_LOSS = Policy(worse=0, smallest=0.002, spread=0.0005)
_THROUGHPUT = Policy(worse=-1, smallest=0.01, spread=0.001)


def is_of_pair(metric: str) -> bool:
    """Whether a series is one of a pair: it is then named by the function of both arms, `ratio(…, …)`."""
    return metric.endswith(")")


def policy_of(metric: str, operator: str = "") -> Policy:
    """The policy of a metric, or of a pair's ratio, whose limit says by its operator what is worse."""
    if is_of_pair(metric):
        return _THROUGHPUT if operator.startswith(">") else _TIME
    if metric.startswith("memory/"):
        return _MEMORY
    if metric.endswith("/loss"):
        return _LOSS
    return _THROUGHPUT if metric.startswith(_RATE) else _TIME


def phase_metric(phase: str) -> str:
    """The metric that a phase of a run's verdict is the median of."""
    return f"{_PHASE}{phase}"
