# SPDX-License-Identifier: Apache-2.0
"""One figure of a case on two sides, each with its repeats: is the right one worse?

Times are held against each other by the interval of their ratio, allocated GPU memory by its blocks, which
repeat exactly. What a process has resident on a CPU machine moves by itself; it is told, not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lora_suite.history.facts import Fact
from lora_suite.history.metrics import PEAK_MEMORY, policy_of
from lora_suite.judge.memory import compare_peaks
from lora_suite.judge.statistics import log_difference, moved
from lora_suite.judge.verdict import Effect, State

_FEWEST_RUNS = 3


class Figure(Fact):
    """One metric of one case on two sides.

    left, right: its value in each run. effect: right over left, where there are repeats. state: None where it
    is only told. message: why.
    """

    metric: str
    left: tuple[float, ...]
    right: tuple[float, ...]
    state: State | None
    message: str
    effect: Effect | None = None


def compare_figure(metric: str, left: Sequence[float], right: Sequence[float], *, on_gpu: bool) -> Figure:
    """Compare the values of a metric in the runs of two sides, of which each has one at least."""
    figure = Figure(metric=metric, left=tuple(left), right=tuple(right), state=None, message="")
    if metric == PEAK_MEMORY:
        if not on_gpu:
            return figure.model_copy(update={"message": "a process's resident memory, which scatters"})
        change = compare_peaks(max(right), max(left))
        return figure.model_copy(update={"state": change.state, "message": str(change)})
    if len(left) + len(right) < _FEWEST_RUNS:
        share = 100 * (right[0] / left[0] - 1)
        said = f"{share:+.2f} %, and one run a side shows no spread"
        return figure.model_copy(update={"state": "INCONCLUSIVE", "message": said})
    effect = log_difference(_logs(right), _logs(left)).as_ratio()
    state, message = _judged(metric, effect)
    return figure.model_copy(update={"state": state, "message": message, "effect": effect})


def _judged(metric: str, effect: Effect) -> tuple[State, str]:
    policy = policy_of(metric)
    said = (
        f"{100 * (effect.estimate - 1):+.2f} % "
        f"[{100 * (effect.low - 1):+.2f}, {100 * (effect.high - 1):+.2f}]"
    )
    worse = "slower" if policy.worse > 0 else "faster"
    if moved(effect, policy.smallest) == worse:
        return "FAIL", said
    edge = effect.high if policy.worse > 0 else 1 / effect.low
    if edge < 1 + policy.smallest:
        return "PASS", said
    return "INCONCLUSIVE", f"{said}: {100 * policy.smallest:g} % could not be ruled out"


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]
