# SPDX-License-Identifier: Apache-2.0
"""What a suite asks for and what a plan orders: cases, pairs, runs, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_suite.config.schema import Recipe


@dataclass(frozen=True)
class DeclaredCheck:
    """A threshold expression as the driver states it, with the line it stands on and its conditions.

    when: ``KEY=VALUE`` of the recipe under which it applies (None: always).
    on: GPU model for which it is the limit (None: every machine).
    """

    expression: str
    line: int
    when: str | None = None
    on: str | None = None


@dataclass(frozen=True)
class Case:
    """Recipe + driver: one training that a suite can run.

    steps: the last step that must be reached. minutes: wall-clock limit of one run.
    """

    stem: str
    recipe_path: Path
    driver_path: Path
    recipe: Recipe
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

    reuse: judged on runs that other pairs make, so this pair adds none.
    not_comparable: differences beyond what the pair allows; with any, the pair is INCOMPARABLE.
    """

    name: str
    arms: dict[str, str]
    checks: tuple[str, ...]
    repeats: int
    reuse: bool
    not_comparable: tuple[Difference, ...] = ()


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
    """A suite resolved: everything that will run, in order, and everything that must get a verdict."""

    suite: str
    path: Path
    cases: dict[str, Case]
    pairs: tuple[Pair, ...]
    runs: tuple[PlannedRun, ...]
    budget_gpu_hours: float | None

    @property
    def gpu_hours(self) -> float:
        """Upper bound of the plan's cost: GPUs × minutes limit of every run, exact."""
        return sum(self.cases[run.case].gpus * self.cases[run.case].minutes for run in self.runs) / 60.0
