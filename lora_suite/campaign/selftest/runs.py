# SPDX-License-Identifier: Apache-2.0
"""Run directories made by hand: a whole and healthy run of a shipped case, to which damage can be done."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lora_suite.config import ResolvedRecipe, load_recipe
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.launch.record import Ended
from lora_suite.launch.starter import root
from lora_suite.plan.metric_names import LOSS, STEP_TIME, TOTAL_STEP_TIME, VALID_TOKENS
from lora_suite.plan.model import Case, DeclaredCheck

FULL = "sft-tiny-llama-1n2c-fsdp2"
LORA = "sft-tiny-llama-1n2c-fsdp2-lora"
STEPS = 10
LOSS_FALLS = f'data["{LOSS}"]["10"] < 2.0'
DONE = Ended(how="done", status=0)

Damage = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes metrics and record, both as they will be written."""


@cache
def recipe(stem: str) -> ResolvedRecipe:
    """The shipped recipe of that name."""
    return load_recipe(root() / "recipes" / f"{stem}.yaml", [])


def make_case(stem: str = FULL, checks: tuple[DeclaredCheck, ...] | None = None, steps: int = STEPS) -> Case:
    """A case of a shipped recipe that declares `steps` steps."""
    if checks is None:
        checks = (DeclaredCheck(LOSS_FALLS, line=6, call=6),)
    return Case(
        stem=stem,
        recipe_path=root() / "recipes" / f"{stem}.yaml",
        driver_path=root() / "scripts" / f"{stem}.sh",
        recipe=recipe(stem).recipe,
        tree=recipe(stem).tree,
        overrides=(),
        steps=steps,
        minutes=3.0,
        checks=checks,
    )


def per_step(value: Callable[[int], float | None], steps: int = STEPS) -> dict[str, float | None]:
    """A series with one value a step."""
    return {str(step): value(step) for step in range(1, steps + 1)}


def healthy(
    case: Case, repeat: int, step_time: float = 0.1, steps: int = STEPS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """metrics.json and run.json of a run that did everything right."""
    metrics: dict[str, Any] = {
        LOSS: per_step(lambda step: 3.0 * math.exp(-0.1 * step), steps),
        "train/grad_norm": per_step(lambda step: 1.0, steps),
        "train/lr": per_step(lambda step: 1e-3, steps),
        VALID_TOKENS: per_step(lambda step: 100 + step, steps),
        TOTAL_STEP_TIME: per_step(lambda step: step_time + (5.0 if step == 1 else 0.01), steps),
        STEP_TIME: per_step(lambda step: step_time + (5.0 if step == 1 else 0.0), steps),
        "memory/peak_allocated_gib": per_step(lambda step: 0.5, steps),
        "validation/loss": {str(steps): 1.5},
    }
    record: dict[str, Any] = {
        "schema_version": 1,
        "run_id": f"{case.stem}-{repeat}-0123abcd",
        "case": case.stem,
        "started": "2100-01-01T00:00:00+00:00",
        # A copy: what damages a record must not change the case for others.
        "recipe": copy.deepcopy(case.tree),
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
    sealed: bool = False,
) -> Path:
    """Write a run directory; `damage` may change metrics and record before they are written.

    sealed: the record holds the hash of the metrics, as a training's does.
    """
    metrics, record = healthy(case, repeat, step_time, steps)
    if damage is not None:
        damage(metrics, record)
    run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(metrics)
    if sealed:
        record["metrics_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (run_dir / "metrics.json").write_text(text, encoding="utf-8")
    (run_dir / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return run_dir
