# SPDX-License-Identifier: Apache-2.0
"""What a suite asks for and what a plan orders: cases, pairs, runs, as plain frozen data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from lora_suite.config.schema import Recipe
from lora_suite.plan.external.dialect import Dialect


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


@dataclass(frozen=True, kw_only=True)
class BaseCase(ABC):
    """What every case has, whoever trains it.

    stem: its name. tree: what is known of its configuration as plain values, as run.json keeps it. overrides:
    words that its driver or command is started with. steps: the last step that must be reached. minutes:
    wall-clock limit of one run. driver_judges: whether a bad verdict of its driver or command counts; not
    where the case is slow on purpose, and `checks` is empty for that. owner: who answers for it, if known.
    segments: jobs of a cluster that one run may be spread over; each continues from the checkpoint of the one
    before, and has its share of `minutes`.
    """

    stem: str
    tree: dict[str, Any]
    overrides: tuple[str, ...]
    steps: int
    minutes: float
    checks: tuple[DeclaredCheck, ...]
    driver_judges: bool = True
    owner: str = ""
    segments: int = 1

    @property
    @abstractmethod
    def nodes(self) -> int:
        """Nodes of one run."""

    @property
    @abstractmethod
    def gpus(self) -> int:
        """Processes of one run: GPUs, or on CPU machines counted processes."""

    @property
    @abstractmethod
    def lora(self) -> bool:
        """Whether this case adapts rather than trains the weights themselves."""

    @property
    @abstractmethod
    def origin(self) -> Path:
        """The file that says what is checked: what a check without a file of its own stands in."""


@dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """Recipe + driver: one training of ours that a suite can run. tree: the resolved recipe."""

    recipe_path: Path
    driver_path: Path
    recipe: Recipe

    @property
    def nodes(self) -> int:
        """Nodes of one run, by the recipe."""
        return self.recipe.cluster.num_nodes

    @property
    def gpus(self) -> int:
        """Processes of one run, by the recipe."""
        return self.recipe.world_size

    @property
    def lora(self) -> bool:
        """Whether the recipe has LoRA on."""
        return self.recipe.policy.lora.enabled

    @property
    def origin(self) -> Path:
        """The driver."""
        return self.driver_path


@dataclass(frozen=True, kw_only=True)
class ExternalCase(BaseCase):
    """A command of another trainer, run as it is, and a description of what it leaves behind.

    command: words, the overrides not among them. cwd: the folder it runs in, absolute. outputs: files and
    folders that a run creates, relative to cwd. metrics: where its metrics then lie, one of the outputs or
    below one. dialect: how they are read. facts: what the case says of itself, by the names of
    `lora_suite.plan.facts`. recipe_tree: its own recipe as plain values, None where there is none to read.
    source: the script or suite that declares it. left: checks that only its script can make, with the reason.
    """

    command: tuple[str, ...]
    cwd: Path
    outputs: tuple[Path, ...]
    metrics: Path
    dialect: Dialect
    facts: dict[str, object]
    recipe_tree: dict[str, Any] | None
    processes: int
    source: Path
    left: tuple[str, ...] = ()
    declared_nodes: int = 1

    @property
    def nodes(self) -> int:
        """Nodes of one run, as declared."""
        return self.declared_nodes

    @property
    def gpus(self) -> int:
        """Processes of one run, as declared."""
        return self.processes

    @property
    def lora(self) -> bool:
        """Whether it is declared to adapt."""
        return self.facts.get("lora") is True

    @property
    def origin(self) -> Path:
        """The script, or without one the suite."""
        return self.source


@dataclass(frozen=True, kw_only=True)
class UnreadableCase(BaseCase):
    """An external case whose own files cannot be read. Its runs are planned all the same, and MISSING.

    problem: one line that names file, line and what is wrong.
    """

    problem: str
    source: Path

    @property
    def nodes(self) -> int:
        """None run."""
        return 0

    @property
    def gpus(self) -> int:
        """None run."""
        return 0

    @property
    def lora(self) -> bool:
        """Not known."""
        return False

    @property
    def origin(self) -> Path:
        """The suite that names it."""
        return self.source


AnyCase = Case | ExternalCase | UnreadableCase


@dataclass(frozen=True)
class Difference:
    """A key in which two arms differ, with both values as they resolve."""

    key: str
    left: object
    right: object


@dataclass(frozen=True)
class Canary:
    """What a detector that works says of a pair with a known answer.

    kind: `same` (both arms are one case: no difference), `slower` (the second arm is slowed down while it
    trains) or `injected` (the second arm's recorded step times are multiplied). factor: of that slowdown; for
    `same` the smallest ratio that would be a false alarm.
    """

    kind: Literal["same", "slower", "injected"]
    factor: float


@dataclass(frozen=True)
class Pair:
    """Named arms (case stems) that run interleaved and are judged together.

    The k-th run of every arm, counted by `repeat`, belong together as one block.
    warmup: first steps of every run that the pair's statistics leave out.
    reuse: judged on runs that other pairs make, so this pair adds none.
    not_comparable: differences beyond what the pair allows; with any, the pair is INCOMPARABLE. comparable:
    false where the suite says that this is so.
    different_batches: whether the arms are meant to see different rows, so that no step is matched.
    faults: planted faults in which the arms differ; they are allowed, and printed.
    not_compared: what could not be compared, because an arm does not say it.
    warmup_runs: runs made before the measured ones, and discarded: they warm the machine.
    looks: repeats after which the pair is judged and may end, rising; empty where it is judged once, after
    all of `repeats`. Of a pair that ended early, `repeats` are those made, and the looks made those up to it.
    ended: why it ended before its last look, empty if it didn't.
    canary: for a pair whose answer is known beforehand, what that is. owner: who answers for it, if known.
    """

    name: str
    arms: dict[str, str]
    checks: tuple[str, ...]
    repeats: int
    reuse: bool
    warmup: int = 3
    allow: tuple[str, ...] = ()
    different_batches: bool = False
    not_comparable: tuple[Difference, ...] = ()
    comparable: bool = True
    faults: tuple[Difference, ...] = ()
    not_compared: tuple[str, ...] = ()
    warmup_runs: int = 0
    looks: tuple[int, ...] = ()
    ended: str = ""
    canary: Canary | None = None
    owner: str = ""


@dataclass(frozen=True)
class PlannedRun:
    """One execution of one case: the `repeat`-th (from 1), in the order it is to happen.

    pair and arm name what it was planned for (None for a case outside every pair). Repeat 0 is a run that
    only warms the machine: nothing is measured on it.
    """

    case: str
    repeat: int
    pair: str | None
    arm: str | None

    @property
    def discarded(self) -> bool:
        """Whether nothing is measured on it."""
        return self.repeat == 0


@dataclass(frozen=True)
class Plan:
    """A suite resolved: everything that will run, in order, and everything that must get a verdict.

    suite: the file's stem, which names the results folder. name: its title. budget_minutes: wall-clock time
    that pairs with looks share; None where every run is made. launcher: that the suite asks for.
    """

    suite: str
    path: Path
    cases: dict[str, AnyCase]
    pairs: tuple[Pair, ...]
    runs: tuple[PlannedRun, ...]
    budget_gpu_hours: float | None
    name: str = ""
    description: str = ""
    budget_minutes: float | None = None
    launcher: Literal["local", "slurm"] = "local"

    @property
    def minutes(self) -> float:
        """Upper bound of its wall-clock time: the minutes of every run, or the budget and what it cannot cut.

        Nothing is begun once a budget is over. What was begun may end: a run, or two repeats of a pair.
        """
        return float(self._minutes)

    @property
    def gpu_hours(self) -> float:
        """Upper bound of the plan's cost, summed exactly and rounded once: GPUs × minutes of every run.

        Within a budget, at most the most GPUs that a run has, all the time.
        """
        cases = [self.cases[run.case] for run in self.runs]
        each = sum((case.gpus * Fraction(str(case.minutes)) for case in cases), Fraction())
        if self.budget_minutes is None or not cases:
            return float(each / 60)
        return float(min(each, max(case.gpus for case in cases) * self._minutes) / 60)

    @property
    def _minutes(self) -> Fraction:
        each = [Fraction(str(self.cases[run.case].minutes)) for run in self.runs]
        if self.budget_minutes is None or not each:
            return sum(each, Fraction())
        begun = max([2 * len(pair.arms) for pair in self.pairs if pair.looks], default=1)
        return min(sum(each, Fraction()), Fraction(str(self.budget_minutes)) + begun * max(each))
