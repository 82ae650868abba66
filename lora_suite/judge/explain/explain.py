# SPDX-License-Identifier: Apache-2.0
"""The whole explanation: phases, kernels, and what else differs."""

from __future__ import annotations

import statistics

from lora_suite.judge.explain.kernels import Timings, compare_profiles, kernels_per_step
from lora_suite.judge.explain.model import Compared, Explanation, Side
from lora_suite.judge.explain.phases import decompose
from lora_suite.judge.explain.unlike import unlike
from lora_suite.plan.metric_names import FLOOR_RATIO


def explain(left: Side, right: Side) -> Explanation:
    """Say why the right side's step takes longer, or less long, than the left side's.

    Raises NothingTimed where a side has no step times.
    """
    notes: list[str] = []
    found = decompose(left, right, notes)
    if found.step.low is None:
        notes.append("a side has one run: how much runs scatter is not known, so there is no interval")
    profiles = Timings([], [])
    if left.profile is not None and right.profile is not None:
        delta = found.step.delta if found.step.share is not None else None
        names = (left.name, right.name)
        profiles = compare_profiles(left.profile, right.profile, delta, names, notes)
    elif left.profile is not None or right.profile is not None:
        lacking = left.name if left.profile is None else right.name
        notes.append(f"no kernels: {lacking} was not profiled (--profile)")
    return Explanation(
        left=_compared(left, found.chosen.left),
        right=_compared(right, found.chosen.right),
        step=found.step,
        changed=found.changed,
        matched=found.chosen.matched,
        trimmed=found.chosen.trimmed,
        phases=found.parts,
        kernels=profiles.kernels,
        operators=profiles.operators,
        unlike=unlike(left.runs[0], right.runs[0]),
        notes=list(dict.fromkeys(notes)),
    )


def _compared(side: Side, steps: list[list[int]]) -> Compared:
    directories = [str(directory) for directory in side.directories]
    floors = [each.metrics[FLOOR_RATIO] for each in side.runs if FLOOR_RATIO in each.metrics]
    ratios = [value for of_run in floors for value in of_run.finite_part().values]
    floor = side.runs[0].record.floor
    return Compared(
        name=side.name,
        directories=directories,
        steps=sum(map(len, steps)),
        over_floor=statistics.median(ratios) if ratios else None,
        floor_bound=floor.bound_by if floor is not None else "",
        kernels_per_step=kernels_per_step(side.profile) if side.profile is not None else None,
    )
