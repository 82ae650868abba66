# SPDX-License-Identifier: Apache-2.0
"""Two profiles side by side, by the names of kernels and operators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lora_suite.judge.explain.model import Calls
from lora_suite.launch.traces import Kind, Profile

# torch.compile numbers its kernels in the order in which it makes them, so one more renames all behind it.
_COMPILED = re.compile(r"^(triton_\w*?)_\d+$")


@dataclass(frozen=True)
class Timings:
    """What changed on the device and on the host, largest part in the step's change first."""

    kernels: list[Calls]
    operators: list[Calls]


@dataclass
class _Sum:
    microseconds: float = 0.0
    calls: float = 0.0


_Key = tuple[Kind, str, str]


def compare_profiles(
    left: Profile, right: Profile, step_delta: float | None, names: tuple[str, str], notes: list[str]
) -> Timings:
    """Compare two profiles, per step; adds to `notes`.

    step_delta: seconds by which the right side's step is slower, of which shares are taken; None where there
    is no change to share. names: of the sides, for notes.
    """
    for profile, name in ((left, names[0]), (right, names[1])):
        if not profile.steps:
            notes.append(f"the trace of {name} has no marks of steps: all of it is taken as one step")
    phased = all(any(row.phase for row in profile.timed) for profile in (left, right))
    ours, theirs = _sums(left, phased), _sums(right, phased)
    found: dict[Kind, list[Calls]] = {"kernel": [], "operator": []}
    for key in sorted(ours.keys() | theirs.keys()):
        kind, name, phase = key
        one, other = ours.get(key), theirs.get(key)
        before, after = one or _Sum(), other or _Sum()
        delta = after.microseconds - before.microseconds
        found[kind].append(
            Calls(
                name=name,
                phase=phase,
                left_us=before.microseconds if one is not None else None,
                right_us=after.microseconds if other is not None else None,
                left_calls=before.calls,
                right_calls=after.calls,
                delta_us=delta,
                share=delta / (1e6 * step_delta) if step_delta else None,
            )
        )
    for rows in found.values():
        if step_delta is None:
            rows.sort(key=lambda row: -abs(row.delta_us))
        else:
            rows.sort(key=lambda row: -(row.share or 0.0))
    return Timings(found["kernel"], found["operator"])


def kernels_per_step(profile: Profile) -> float:
    """How many kernels, copies and fills a step starts on the device."""
    return sum(row.count for row in profile.timed if row.kind == "kernel") / max(profile.steps, 1)


def _sums(profile: Profile, phased: bool) -> Mapping[_Key, _Sum]:
    """Time and calls a step, by kind, name and phase (all in one where a side knows no phases)."""
    steps = max(profile.steps, 1)
    sums: dict[_Key, _Sum] = {}
    for row in profile.timed:
        key = (row.kind, _COMPILED.sub(r"\1", row.name), row.phase if phased else "")
        total = sums.setdefault(key, _Sum())
        total.microseconds += (row.device_us if row.kind == "kernel" else row.host_us) / steps
        total.calls += row.count / steps
    return sums
