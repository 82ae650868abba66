# SPDX-License-Identifier: Apache-2.0
"""A limit from the noise of repeated runs, and whether the runs are steady enough to have one.

For the values v_1 … v_N of one check, one a run, with median m:

    spread     s = 1.4826 · median |v_i − m|               (robust standard deviation)
    resolvable e = (t(N−1, 0.975) + t(N−1, 0.8)) · sd(log v) · √(1 + 1/N)
    margin     d = max(3·s / m, 5 %, exp(e) − 1)
    limit      m · (1 + d) for an upper limit, m / (1 + d) for a lower one, rounded away from m

s is not moved by one odd run; a normal run is above three of it once in 740. e is the smallest effect that a
single new run shows against N earlier ones with 80 % power at two-sided 5 %: the pair's formula in
`lora_suite.judge.statistics`, with the spread of a new observation, √(1 + 1/N), in place of that of a mean. A
tighter limit would judge what the case cannot resolve. 5 % is the margin below which the checker calls a pass
narrow. The factor 1.4826 makes s the standard deviation of a normal distribution (Rousseeuw and Croux,
"Alternatives to the Median Absolute Deviation", JASA 88, 1993).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lora_suite.judge.statistics import Operator, detectable_log_effect

FEWEST_REPEATS = 3
SMALLEST_MARGIN = 0.05
# Beyond this the limit would let through what the suite is there to find.
LARGEST_MARGIN = 0.25
LARGEST_DRIFT = 0.10
FEWEST_STEPS = 6
_ROBUST = 1.4826
_SPREADS = 3.0
_DIGITS = 3


class Unsteady(Exception):
    """The runs do not allow a limit; the text says why."""


@dataclass(frozen=True)
class Limit:
    """A proposed limit. median, spread: of the runs, in the check's unit. margin, resolvable: as shares."""

    operator: Operator
    value: float
    median: float
    spread: float
    margin: float
    resolvable: float
    repeats: int


def propose_limit(values: Sequence[float], operator: Operator) -> Limit:
    """Return the limit that the values of N runs support; raises Unsteady where they support none.

    operator: how a value is held against the limit. Values must be positive, as times and sizes are.
    """
    repeats = len(values)
    if repeats < FEWEST_REPEATS:
        raise Unsteady(f"{repeats} runs are too few for a spread: {FEWEST_REPEATS} are the least")
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise Unsteady(f"a run has the value {value:g}: a margin needs positive values")
    median = statistics.median(values)
    spread = _ROBUST * statistics.median(abs(value - median) for value in values)
    log_spread = statistics.stdev(math.log(value) for value in values)
    # √(N+1) / √N is √(1 + 1/N), and the pair's formula has divided by √N.
    resolvable = math.expm1(detectable_log_effect(log_spread, repeats) * math.sqrt(repeats + 1))
    margin = max(_SPREADS * spread / median, SMALLEST_MARGIN, resolvable)
    if margin > LARGEST_MARGIN:
        raise Unsteady(
            f"{repeats} runs from {min(values):.4g} to {max(values):.4g} need a margin of "
            f"{100 * margin:.0f} %, more than {100 * LARGEST_MARGIN:.0f} %: quieten the machine, repeat more"
        )
    upper = operator in ("<", "<=")
    exact = median * (1 + margin) if upper else median / (1 + margin)
    return Limit(operator, _rounded(exact, up=upper), median, spread, margin, resolvable, repeats)


def drift(step_times: Sequence[float]) -> float:
    """Median of the last third of a run's steps over that of the first third, less 1.

    Raises Unsteady for fewer than `FEWEST_STEPS` steps, warm-up not counted, and for times that are none.
    """
    if len(step_times) < FEWEST_STEPS:
        raise Unsteady(f"{len(step_times)} steps after warm-up are too few to tell whether they are steady")
    third = len(step_times) // 3
    first = statistics.median(step_times[:third])
    if not first > 0:
        raise Unsteady(f"a step takes {first:g} s at first, which no step can")
    return statistics.median(step_times[-third:]) / first - 1.0


def _rounded(value: float, *, up: bool) -> float:
    """Three significant digits, away from the values that the limit is for."""
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    # Division leaves 0.1 a hair above or below: what is whole to nine digits stays.
    scaled = round(value / unit, 9)
    whole = math.ceil(scaled) if up else math.floor(scaled)
    return float(f"{whole * unit:.{_DIGITS}g}")
