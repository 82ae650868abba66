# SPDX-License-Identifier: Apache-2.0
"""What `lora-suite explain` says, as data: every number a second, unless its name says µs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from lora_suite.judge.evidence import Evidence
from lora_suite.judge.verdict import Model
from lora_suite.launch.traces import Profile

OTHER = "other"
"""The part of a step that no phase accounts for."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: repeats of one case, at least one, in order.

    name: what to call it. directories: of the repeats. profile: of one of them, None where none was profiled.
    """

    name: str
    directories: tuple[Path, ...]
    runs: tuple[Evidence, ...]
    profile: Profile | None = None


class Part(Model):
    """What one phase contributes: mean seconds of a step on both sides, and what of the change is its.

    share: of the step's change, None where the step did not change. low, high: 95 % interval of `delta`, None
    where a side has one run.
    """

    phase: str
    left: float
    right: float
    delta: float
    low: float | None = None
    high: float | None = None
    share: float | None = None


class Calls(Model):
    """One kernel (or operator) on both sides, per step; None for what a side does not have."""

    name: str
    phase: str
    left_us: float | None
    right_us: float | None
    left_calls: float
    right_calls: float
    delta_us: float
    share: float | None = None


class Unlike(Model):
    """Something that is not the same: a fault that was planted, code, a package, the machine, a setting."""

    what: Literal["fault", "code", "package", "machine", "configuration"]
    key: str
    left: str
    right: str


class Compared(Model):
    """One side, as a report names it.

    over_floor: its step as a multiple of the floor, None where that is not known; floor_bound: the floor's
    largest term. kernels_per_step: what a step starts on the device, copies and fills among it, by its
    profile; None without one.
    """

    name: str
    directories: list[str]
    steps: int
    over_floor: float | None = None
    floor_bound: str = ""
    kernels_per_step: float | None = None


class Explanation(Model):
    """A step's change, taken apart.

    step: the whole step's; its `delta` is the sum of the phases', and its `share` is None where the change is
    too small to share out (0.5 % of the step). changed: whether the step has changed for certain, where there
    are repeats; else whether the change is not that small. phases: largest share first. kernels: on the
    device, operators: on the host, both largest part in the change first. matched: the same steps of both
    sides were compared, because their batches are the same. trimmed: steps that were left out on each side
    for being extreme.
    """

    schema_version: int = 1
    left: Compared
    right: Compared
    step: Part
    changed: bool
    matched: bool
    trimmed: int
    phases: list[Part]
    kernels: list[Calls] = Field(default_factory=list)
    operators: list[Calls] = Field(default_factory=list)
    unlike: list[Unlike] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
