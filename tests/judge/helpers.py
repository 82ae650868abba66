# SPDX-License-Identifier: Apache-2.0
"""Run directories made by hand: a whole and healthy run, to which each test does its own damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_suite.campaign.selftest.runs import (
    DONE,
    FULL,
    LORA,
    LOSS_FALLS,
    STEPS,
    Damage,
    healthy,
    make_case,
    per_step,
    recipe,
    write_run,
)
from lora_suite.judge.verdict import RunVerdict
from lora_suite.plan.model import Pair, Plan, PlannedRun

__all__ = [
    "DONE",
    "FULL",
    "LORA",
    "LOSS_FALLS",
    "RATIO",
    "ROOT",
    "STEPS",
    "Damage",
    "healthy",
    "make_case",
    "make_pair",
    "make_plan",
    "per_step",
    "planned",
    "recipe",
    "states",
    "write_run",
]

ROOT = Path(__file__).resolve().parents[2]
RATIO = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 0.8'


def planned(case: str = FULL, repeat: int = 1, pair: str | None = None, arm: str | None = None) -> PlannedRun:
    """A planned run."""
    return PlannedRun(case=case, repeat=repeat, pair=pair, arm=arm)


def make_pair(repeats: int = 4, checks: tuple[str, ...] = (RATIO,), **changes: Any) -> Pair:
    """The pair of the full and the LoRA case."""
    settings: dict[str, Any] = {
        "name": "fsdp2",
        "arms": {"full": FULL, "lora": LORA},
        "checks": checks,
        "repeats": repeats,
        "reuse": False,
    }
    return Pair(**settings | changes)


def make_plan(pair: Pair | None = None, **changes: Any) -> Plan:
    """A plan of one pair, its runs in the order of repeats."""
    pair = pair or make_pair()
    runs = [
        planned(case, repeat, pair.name, arm)
        for repeat in range(1, pair.repeats + 1)
        for arm, case in pair.arms.items()
    ]
    settings: dict[str, Any] = {
        "suite": "smoke",
        "path": Path("suites/smoke.yaml"),
        "cases": {stem: make_case(stem) for stem in pair.arms.values()},
        "pairs": (pair,),
        "runs": tuple(runs),
        "budget_gpu_hours": None,
    }
    return Plan(**settings | changes)


def states(verdict: RunVerdict) -> dict[str, str]:
    """State of each check by name."""
    return {check.name: check.state for check in verdict.checks}
