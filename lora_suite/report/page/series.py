# SPDX-License-Identifier: Apache-2.0
"""A run's stored series as curves: which to draw, and equal ones once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from check_metrics.series import describe_steps, is_keyed_by_step
from lora_suite.judge.verdict import RunVerdict
from lora_suite.report.page.charts import Curve

# The whole step: the sum of the other phases, so none of them.
TOTALS = frozenset({"step_time", "total_step_time"})
# Sampled by the device; the trainer's own figure; in the order of preference. A star stands for the device.
_MEMORY = ("ray/node.*.gpu.*.mem_gb", "memory/peak_allocated_gib", "memory/peak_reserved_gib")


@dataclass(frozen=True)
class MemoryMetric:
    """The metric that shows memory over time: its pattern, in words, and what its x counts."""

    metric: str
    words: str
    x_label: str


def memory_metric(runs: Sequence[RunVerdict]) -> MemoryMetric | None:
    """The best metric of memory that these runs have; of several devices, each run shows its fullest."""
    for pattern in _MEMORY:
        if any(fnmatchcase(metric, pattern) for run in runs for metric in run.series):
            if "*" in pattern:
                return MemoryMetric(pattern, "in use on the fullest device", x_label(pattern))
            words = pattern.partition("/")[2].removesuffix("_gib").replace("_", " ")
            return MemoryMetric(pattern, words, x_label(pattern))
    return None


def x_label(metric: str) -> str:
    """What the positions of a metric's points count."""
    return "step" if is_keyed_by_step(metric) else "s since the start"


def curves_of(runs: Sequence[RunVerdict], metric: str, styles: Sequence[str], name: str) -> list[Curve]:
    """One curve a run that has the metric (a pattern stands for its device with the highest value).

    Runs with the same values share one curve: `name` and their repeats call it. styles: taken in turn.
    """
    groups: dict[tuple[tuple[float, ...], tuple[float, ...]], list[int]] = {}
    for run in runs:
        fitting = [points for key, points in run.series.items() if fnmatchcase(key, metric)]
        highest = max(
            (points for points in fitting if points.values), key=lambda each: max(each.values), default=None
        )
        if highest is not None:
            groups.setdefault((tuple(highest.at), tuple(highest.values)), []).append(run.repeat)
    return [
        Curve(f"{name} {describe_steps(sorted(set(repeats)))}", styles[number % len(styles)], at, values)
        for number, ((at, values), repeats) in enumerate(groups.items())
    ]
