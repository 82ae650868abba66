# SPDX-License-Identifier: Apache-2.0
"""The levels of a whole series: where it moved, looking back.

Optimal partitioning (Jackson et al., IEEE Signal Processing Letters 12, 2005): of all ways to cut n nights
into levels of five nights or more, the one with the smallest sum of squared deviations of log values from
their levels plus a penalty a cut,

    penalty = 4 · s² · (1 + r)/(1 - r) · log n,    s = 1.4826 · median |x_i - x_(i-1)| / sqrt(2 · (1 - r)),

with r = 0.3, the autocorrelation of nights. That is the Schwarz criterion's order of magnitude for correlated
noise, doubled. Single odd nights are first moved to within 3 s of the running median of seven. Neighbouring
levels that differ by less than the metric's smallest change are one.

The exact search is quadratic and takes 20 ms for 1,000 nights in numpy; a library for it would take longer to
import. Tests hold it against one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_suite.history.metrics import Policy
from lora_suite.history.monitor import AUTOCORRELATION

if TYPE_CHECKING:
    import numpy as np

FEWEST_ON_A_LEVEL = 5
PENALTY = 4.0
_ROBUST = 1.4826
_ODD = 3.0
_WINDOW = 7


def change_points(values: Sequence[float], policy: Policy) -> list[int]:
    """Index of the first night of every level but the first, ascending. values: positive, oldest first."""
    if len(values) < 2 * FEWEST_ON_A_LEVEL:
        return []
    logs = [math.log(value) for value in values]
    spread = _spread(logs, policy.spread)
    inflation = (1 + AUTOCORRELATION) / (1 - AUTOCORRELATION)
    penalty = PENALTY * spread**2 * inflation * math.log(len(logs))
    cuts = partition(_without_odd(logs, _ODD * spread), penalty)
    return _merged(logs, cuts, policy.smallest)


def partition(values: Sequence[float], penalty: float) -> list[int]:
    """The cuts of the cheapest partition into levels of `FEWEST_ON_A_LEVEL` values or more."""
    import numpy as np

    count, least = len(values), FEWEST_ON_A_LEVEL
    centred = np.asarray(values) - np.mean(values)
    sums = np.concatenate(([0.0], np.cumsum(centred)))
    squares = np.concatenate(([0.0], np.cumsum(centred**2)))
    best = np.full(count + 1, np.inf)
    best[0] = -penalty
    previous = np.zeros(count + 1, dtype=int)
    for end in range(least, count + 1):
        starts = np.arange(0, end - least + 1)
        costs = best[starts] + _cost(sums, squares, starts, end) + penalty
        previous[end] = int(np.argmin(costs))
        best[end] = costs[previous[end]]
    cuts = []
    end = int(previous[count])
    while end > 0:
        cuts.append(end)
        end = int(previous[end])
    return cuts[::-1]


def _cost(sums: np.ndarray, squares: np.ndarray, starts: np.ndarray, end: int) -> np.ndarray:
    """Sum of squared deviations from the mean of values[start:end], for every start."""
    inside = sums[end] - sums[starts]
    deviations: np.ndarray = squares[end] - squares[starts] - inside**2 / (end - starts)
    return deviations


def _spread(logs: Sequence[float], least: float) -> float:
    """Spread of a night around its level, from differences of neighbours: no level is needed for it."""
    steps = [abs(after - before) for before, after in itertools.pairwise(logs)]
    return max(_ROBUST * statistics.median(steps) / math.sqrt(2 * (1 - AUTOCORRELATION)), least)


def _without_odd(logs: Sequence[float], limit: float) -> list[float]:
    half = _WINDOW // 2
    typical = [statistics.median(logs[max(0, at - half) : at + half + 1]) for at in range(len(logs))]
    return [max(middle - limit, min(log, middle + limit)) for log, middle in zip(logs, typical, strict=True)]


def _merged(logs: Sequence[float], cuts: Sequence[int], smallest: float) -> list[int]:
    """The cuts less those between levels that hardly differ, the most alike first."""
    kept = list(cuts)
    while kept:
        edges = [0, *kept, len(logs)]
        levels = [statistics.median(logs[start:end]) for start, end in itertools.pairwise(edges)]
        steps = [abs(after - before) for before, after in itertools.pairwise(levels)]
        least = min(range(len(steps)), key=steps.__getitem__)
        if steps[least] >= math.log1p(smallest):
            break
        del kept[least]
    return kept
