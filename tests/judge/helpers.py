# SPDX-License-Identifier: Apache-2.0
"""Run directories made by hand: a whole and healthy run, to which each test does its own damage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lora_suite.config import ResolvedRecipe, load_recipe
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.judge.verdict import RunVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Case, DeclaredCheck, Pair, Plan, PlannedRun

ROOT = Path(__file__).resolve().parents[2]
FULL = "sft-tiny-llama-1n2c-fsdp2"
LORA = "sft-tiny-llama-1n2c-fsdp2-lora"
STEPS = 10
RATIO = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 0.8'
LOSS_FALLS = 'data["train/loss"]["10"] < 2.0'

DONE = Ended(how="done", status=0)
Damage = Callable[[dict[str, Any], dict[str, Any]], None]


@cache
def recipe(stem: str) -> ResolvedRecipe:
    """The shipped recipe of that name."""
    return load_recipe(ROOT / "recipes" / f"{stem}.yaml", [])


def make_case(stem: str = FULL, checks: tuple[DeclaredCheck, ...] | None = None, steps: int = STEPS) -> Case:
    """A case of a shipped recipe that declares `steps` steps."""
    if checks is None:
        checks = (DeclaredCheck(LOSS_FALLS, line=6, call=6),)
    return Case(
        stem=stem,
        recipe_path=ROOT / "recipes" / f"{stem}.yaml",
        driver_path=ROOT / "scripts" / f"{stem}.sh",
        recipe=recipe(stem).recipe,
        tree=recipe(stem).tree,
        overrides=(),
        steps=steps,
        minutes=3.0,
        checks=checks,
    )


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


def per_step(value: Callable[[int], float | None], steps: int = STEPS) -> dict[str, float | None]:
    """A series with one value a step."""
    return {str(step): value(step) for step in range(1, steps + 1)}


def healthy(
    case: Case, repeat: int, step_time: float = 0.1, steps: int = STEPS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """metrics.json and run.json of a run that did everything right."""
    metrics: dict[str, Any] = {
        "train/loss": per_step(lambda step: 3.0 * math.exp(-0.1 * step), steps),
        "train/grad_norm": per_step(lambda step: 1.0, steps),
        "train/lr": per_step(lambda step: 1e-3, steps),
        "train/global_valid_toks": per_step(lambda step: 100 + step, steps),
        "timing/train/total_step_time": per_step(
            lambda step: step_time + (5.0 if step == 1 else 0.01), steps
        ),
        "timing/train/step_time": per_step(lambda step: step_time + (5.0 if step == 1 else 0.0), steps),
        "memory/peak_allocated_gib": per_step(lambda step: 0.5, steps),
        "validation/loss": {str(steps): 1.5},
    }
    record = {
        "schema_version": 1,
        "run_id": f"{case.stem}-{repeat}-0123abcd",
        "case": case.stem,
        "started": "2100-01-01T00:00:00+00:00",
        "recipe": case.tree,
        "recipe_hash": "0",
        "steps_done": steps,
        "segments": [1],
        "batches": {str(step): f"batch-{step}" for step in range(1, steps + 1)},
        "environment": {"strict": {"device": None, "torch": "2.13.0"}, "soft": {}},
        "ended": DONE.model_dump(),
    }
    if case.lora:
        record["invariants"] = [
            {"name": name, "ok": True, "message": "as it should"} for name in REQUIRED_INVARIANTS
        ]
    return metrics, record


def write_run(
    run_dir: Path,
    case: Case,
    repeat: int = 1,
    *,
    step_time: float = 0.1,
    steps: int = STEPS,
    damage: Damage | None = None,
) -> Path:
    """Write a run directory; `damage` may change metrics and record before they are written."""
    metrics, record = healthy(case, repeat, step_time, steps)
    if damage is not None:
        damage(metrics, record)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    (run_dir / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return run_dir


def states(verdict: RunVerdict) -> dict[str, str]:
    """State of each check by name."""
    return {check.name: check.state for check in verdict.checks}
