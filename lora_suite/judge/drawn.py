# SPDX-License-Identifier: Apache-2.0
"""What reports draw of a run: its phases, and series thinned so that no spike is lost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from check_metrics import Series
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.verdict import Points
from lora_suite.plan.metric_names import LOSS, PHASES, STEP_TIME, VALIDATION_LOSS

MOST_POINTS = 300
_DIGITS = 6
_PHASE = "timing/train/{}"
_MEMORY = "ray/"
_PEAK_MEMORY = "memory/peak_allocated_gib"


def phases(evidence: Evidence, warmup: int) -> dict[str, float]:
    """Median seconds of each phase of a step, less `warmup` steps of each segment; phases that take none are
    left out."""
    found = {}
    for phase in PHASES:
        values = evidence.measured(_PHASE.format(phase), warmup).values()
        finite = [value for value in values if math.isfinite(value)]
        median = statistics.median(finite) if finite else 0.0
        if median > 0.0:
            found[phase] = median
    return found


def drawn_series(evidence: Evidence) -> dict[str, Points]:
    """Loss, step time, memory over time, and of a short run the phases; at most `MOST_POINTS` points each.

    Memory is what was sampled on the devices, or, where there are none, the peak so far.
    """
    metrics = evidence.metrics
    sampled = [name for name in metrics if name.startswith(_MEMORY)]
    names = [LOSS, VALIDATION_LOSS, STEP_TIME, *(sampled or [_PEAK_MEMORY])]
    names += [
        name
        for name in map(_PHASE.format, PHASES)
        if name in metrics and len(metrics[name].steps) <= MOST_POINTS and any(metrics[name].values)
    ]
    points = {name: thinned(metrics[name]) for name in names if name in metrics}
    return {name: each for name, each in points.items() if each.at}


def thinned(series: Series, most: int = MOST_POINTS) -> Points:
    """A series' finite values; of a longer one the least and the greatest of each of `most` / 2 stretches.

    Stretches have equally many values. The first and the last value are always there, so the curve begins and
    ends where the run did. Values have `_DIGITS` significant digits.
    """
    kept = [
        (step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)
    ]
    if len(kept) > most:
        inner, stretches = kept[1:-1], most // 2 - 1
        edges = [len(inner) * number // stretches for number in range(stretches + 1)]
        chosen = [point for begin, end in pairwise(edges) for point in _extremes(inner[begin:end])]
        kept = [kept[0], *chosen, kept[-1]]
    return Points(
        at=[float(step) for step, _ in kept], values=[float(f"{value:.{_DIGITS}g}") for _, value in kept]
    )


def _extremes(stretch: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Its least and greatest point in the order of steps; one where they are the same."""
    least = min(stretch, key=lambda point: point[1])
    greatest = max(stretch, key=lambda point: point[1])
    return sorted({least, greatest})
