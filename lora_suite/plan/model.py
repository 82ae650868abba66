# SPDX-License-Identifier: Apache-2.0
"""What a suite asks for and what a plan orders: cases, pairs, runs, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

from lora_suite.config.schema import Recipe


@dataclass(frozen=True)
class Waiver:
    """One limit relaxed for a time: why, where that is discussed, who answers for it, and until which day.

    revert_to: the check that holds again after `until`. line: where the driver states the waiver.
    """

    reason: str
    issue: str
    owner: str
    until: date
    revert_to: str
    line: int

    def expired(self, today: date) -> bool:
        """Whether the relaxed limit no longer counts."""
        return today > self.until


@dataclass(frozen=True)
class DeclaredCheck:
    """A threshold expression that counts today, with the line it stands on and its conditions.

    when: ``KEY=VALUE`` of the recipe under which it applies (None: always).
    on: GPU model for which it is the limit (None: every machine). call: line of the `check` call it stands
    in; the limits that one call gives for several GPU models are alternatives.
    file: the driver or suite that states it. waiver: what relaxes it (once that has expired, `expression` is
    the waiver's `revert_to`).
    """

    expression: str
    line: int
    when: str | None = None
    on: str | None = None
    call: int = 0
    file: Path | None = None
    waiver: Waiver | None = None


@dataclass(frozen=True)
class Case:
    """Recipe + driver: one training that a suite can run.

    tree: the resolved recipe as plain values, as run.json keeps it. overrides: what the driver is started
    with. steps: the last step that must be reached. minutes: wall-clock limit of one run.
    """

    stem: str
    recipe_path: Path
    driver_path: Path
    recipe: Recipe
    tree: dict[str, Any]
    overrides: tuple[str, ...]
    steps: int
    minutes: float
    checks: tuple[DeclaredCheck, ...]

    @property
    def gpus(self) -> int:
        """Processes of one run: GPUs, or on CPU machines counted processes."""
        return self.recipe.world_size

    @property
    def lora(self) -> bool:
        """Whether this case adapts rather than trains the weights themselves."""
        return self.recipe.policy.lora.enabled


@dataclass(frozen=True)
class Difference:
    """A key in which two arms differ, with both values as they resolve."""

    key: str
    left: object
    right: object


@dataclass(frozen=True)
class Pair:
    """Named arms (case stems) that run interleaved and are judged together.

    The k-th run of every arm, counted by `repeat`, belong together as one block.
    warmup: first steps of every run that the pair's statistics leave out.
    reuse: judged on runs that other pairs make, so this pair adds none.
    not_comparable: differences beyond what the pair allows; with any, the pair is INCOMPARABLE.
    faults: planted faults in which the arms differ; they are allowed, and printed.
    """

    name: str
    arms: dict[str, str]
    checks: tuple[str, ...]
    repeats: int
    reuse: bool
    warmup: int = 3
    allow: tuple[str, ...] = ()
    not_comparable: tuple[Difference, ...] = ()
    faults: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """One execution of one case: the `repeat`-th (from 1), in the order it is to happen.

    pair and arm name what it was planned for (None for a case outside every pair).
    """

    case: str
    repeat: int
    pair: str | None
    arm: str | None


@dataclass(frozen=True)
class Plan:
    """A suite resolved: everything that will run, in order, and everything that must get a verdict.

    suite: the file's stem, which names the results folder. name: its title.
    """

    suite: str
    path: Path
    cases: dict[str, Case]
    pairs: tuple[Pair, ...]
    runs: tuple[PlannedRun, ...]
    budget_gpu_hours: float | None
    name: str = ""
    description: str = ""

    @property
    def gpu_hours(self) -> float:
        """Upper bound of the plan's cost: GPUs × minutes of every run, summed exactly and rounded once."""
        cases = [self.cases[run.case] for run in self.runs]
        return float(sum(case.gpus * Fraction(str(case.minutes)) for case in cases) / 60)
