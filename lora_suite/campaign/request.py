# SPDX-License-Identifier: Apache-2.0
"""What `lora-suite run` is asked for."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_suite.campaign.rerun import only_failed
from lora_suite.plan.external.load import Moved
from lora_suite.plan.load import load_plan
from lora_suite.plan.model import Plan


@dataclass(frozen=True)
class Request:
    """What the command line asks for; see `load_plan` for the parts that shape the plan.

    results: folder that gets a new folder for this run of the suite. keep: checkpoints stay. budget_minutes:
    pairs are repeated until they are decided or this is over. history: a store to record to; None is the
    usual one, where there is one. tiers: an expression over tiers (`parse_tiers`). launcher: in place of the
    suite's. site: how jobs are submitted; None is the user's own file. inside_allocation: everything runs in
    the Slurm allocation that is held. ref: a commit that every case is compared with, in place of the suite's
    pairs. rerun_failed: results of an earlier run, of which only what did not pass runs again. moved: see
    `Moved`.
    slots: how many runs of cases outside pairs may be under way at once.
    """

    suite: Path
    overrides: tuple[str, ...] = ()
    arm_overrides: tuple[str, ...] = ()
    select: str | None = None
    repeats: int | None = None
    results: Path = Path("results")
    keep: bool = False
    budget_minutes: float | None = None
    history: Path | None = None
    tiers: str | None = None
    launcher: Literal["local", "slurm"] | None = None
    site: Path | None = None
    inside_allocation: bool = False
    ref: str | None = None
    rerun_failed: Path | None = None
    moved: Moved | None = None
    slots: int = 1

    @property
    def command(self) -> str:
        """What to type to run the same again."""
        words = ["lora-suite", "run", str(self.suite), *self.overrides]
        words += [word for arm in self.arm_overrides for word in ("--arm", arm)]
        words += ["-k", self.select] if self.select is not None else []
        words += ["-m", self.tiers] if self.tiers is not None else []
        words += ["--repeats", str(self.repeats)] if self.repeats is not None else []
        words += ["--budget", f"{self.budget_minutes:g}m"] if self.budget_minutes is not None else []
        words += ["--launcher", self.launcher] if self.launcher is not None else []
        words += ["--site", str(self.site)] if self.site is not None else []
        words += ["--inside-allocation"] if self.inside_allocation else []
        words += ["--ref", self.ref] if self.ref is not None else []
        words += ["--rerun-failed", str(self.rerun_failed)] if self.rerun_failed is not None else []
        words += ["--slots", str(self.slots)] if self.slots > 1 else []
        return shlex.join(words)

    def queued(self, plan: Plan) -> bool:
        """Whether its plan is carried out by jobs of a cluster."""
        return not self.inside_allocation and (self.launcher or plan.launcher) == "slurm"

    def plan(self) -> Plan:
        """Resolve the suite, as it is without `ref`; raises ConfigError."""
        plan = load_plan(
            self.suite,
            select=self.select,
            tiers=self.tiers,
            repeats=self.repeats,
            budget_minutes=self.budget_minutes,
            arm_overrides=self.arm_overrides,
            overrides=self.overrides,
            moved=self.moved,
        )
        return plan if self.rerun_failed is None else only_failed(plan, self.rerun_failed)
