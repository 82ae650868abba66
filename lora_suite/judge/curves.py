# SPDX-License-Identifier: Apache-2.0
"""Two loss curves: the same, the same but for numerics, or as good as each other.

`exact`: every value is the same; what a deterministic run on the same machine and software gives.

`drift`: same data, another kernel or library. With r_i = (new_i - old_i) / |old_i| at step i it asks for

    max |r_i| ≤ 2e-3    and    |mean r_i| ≤ 5e-4

The second catches what a tolerance for each step lets through, a small but steady offset: jitter cancels, a
bug doesn't. The limits lie in the gap of 3,097 pairs of consecutive golden curves of Megatron-LM, of which
half are identical, those after a change of kernels or containers differ by 9e-5 to 1.6e-3 (median and upper
quartile of the largest difference), and those after a change of data or configuration by 5 % and more. They
are for curves of tens of steps: over thousands the smallest difference grows to a larger one.

`statistical`: another seed or order of the data. Steps cannot be compared, so the mean of the last steps of
five and more runs is, by a two-sample t interval on its logarithm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from check_metrics.series import describe_steps
from lora_suite.judge.statistics import log_difference, moved
from lora_suite.judge.verdict import Effect, State

LARGEST_DRIFT = 2e-3
LARGEST_OFFSET = 5e-4
# This many last steps are a level.
LEVEL_STEPS = 20
FEWEST_CURVES = 5
# Seeds alone move the level of a LoRA training by 0.1 to 0.4 %.
SMALLEST_DIFFERENCE = 0.01


@dataclass(frozen=True)
class CurveVerdict:
    """What two curves are to each other.

    tier: the narrowest that holds, `apart` where none does. state: FAIL where apart. largest, offset:
    max |r_i| with its step, and mean r_i; None where the curves could not be compared step by step.
    """

    tier: Literal["exact", "drift", "apart"]
    message: str
    largest: float | None = None
    at_step: int | None = None
    offset: float | None = None

    @property
    def state(self) -> State:
        """PASS where they are the same, but for numerics at most."""
        return "FAIL" if self.tier == "apart" else "PASS"


@dataclass(frozen=True)
class LevelVerdict:
    """Whether runs of other seeds end at another loss; the effect is new over reference."""

    state: State
    message: str
    effect: Effect | None = None


def compare_curves(new: Mapping[int, float], reference: Mapping[int, float]) -> CurveVerdict:
    """Compare two curves, values by step, of runs that saw the same batches.

    A step that one of them lacks, a value that is not finite and curves without a step are `apart`.
    """
    lonely = sorted(new.keys() ^ reference.keys())
    if lonely:
        return CurveVerdict("apart", f"only one curve has step {describe_steps(lonely)}")
    if not new:
        return CurveVerdict("apart", "the curves are empty")
    steps = sorted(new)
    broken = [step for step in steps if not (math.isfinite(new[step]) and math.isfinite(reference[step]))]
    if broken:
        return CurveVerdict("apart", f"not finite at step {describe_steps(broken)}")
    if all(new[step] == reference[step] for step in steps):
        return CurveVerdict("exact", f"equal at all of {len(steps)} steps", 0.0, steps[0], 0.0)
    zeros = [step for step in steps if reference[step] == 0.0]
    if zeros:
        return CurveVerdict("apart", f"the reference is 0 at step {describe_steps(zeros)}")
    drifts = {step: (new[step] - reference[step]) / abs(reference[step]) for step in steps}
    worst = max(steps, key=lambda step: abs(drifts[step]))
    largest, offset = abs(drifts[worst]), statistics.fmean(drifts.values())
    said = (
        f"largest difference {largest:.2g} at step {worst} (limit {LARGEST_DRIFT:g}), "
        f"mean {offset:+.2g} (limit {LARGEST_OFFSET:g})"
    )
    within = largest <= LARGEST_DRIFT and abs(offset) <= LARGEST_OFFSET
    return CurveVerdict("drift" if within else "apart", said, largest, worst, offset)


def compare_levels(
    new: Sequence[Mapping[int, float]],
    reference: Sequence[Mapping[int, float]],
    minimum: float = SMALLEST_DIFFERENCE,
) -> LevelVerdict:
    """Compare where runs of other seeds or orders of data end: one new curve or more, five of the reference.

    FAIL where the level differs clearly and by `minimum` at least, either way; INCONCLUSIVE where so few runs
    could not have shown that.
    """
    if not new or len(reference) < FEWEST_CURVES:
        return LevelVerdict(
            "INCONCLUSIVE",
            f"{len(new)} curves against {len(reference)}: one and {FEWEST_CURVES} are the least",
        )
    try:
        levels = [[_log_level(curve) for curve in curves] for curves in (new, reference)]
    except ValueError as error:
        return LevelVerdict("FAIL", str(error))
    effect = log_difference(levels[0], levels[1]).as_ratio()
    said = (
        f"mean of the last {LEVEL_STEPS} steps {100 * (effect.estimate - 1):+.2f} % "
        f"[{100 * (effect.low - 1):+.2f}, {100 * (effect.high - 1):+.2f}] against the reference"
    )
    if moved(effect, minimum) != "no":
        return LevelVerdict("FAIL", said, effect)
    if max(effect.high - 1, 1 - effect.low) > minimum and (effect.smallest_detectable or 0) > minimum:
        return LevelVerdict("INCONCLUSIVE", f"{said}: {100 * minimum:g} % could not be seen", effect)
    return LevelVerdict("PASS", said, effect)


def _log_level(curve: Mapping[int, float]) -> float:
    steps = sorted(curve)[-LEVEL_STEPS:]
    if len(steps) < LEVEL_STEPS:
        raise ValueError(f"a curve of {len(steps)} steps has no level: {LEVEL_STEPS} are the least")
    level = statistics.fmean(curve[step] for step in steps)
    if not (math.isfinite(level) and level > 0):
        raise ValueError(f"the mean of the last {LEVEL_STEPS} steps is {level:g}")
    return math.log(level)
