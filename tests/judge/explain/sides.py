# SPDX-License-Identifier: Apache-2.0
"""Runs made by hand: seconds of each phase by step, and what the record says beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from check_metrics import Series
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.explain import Side
from lora_suite.launch.record import Environment, RunRecord
from lora_suite.launch.traces import Profile

STEPS = 23
"""Steps of a run: three of warm-up, twenty to compare, of which two are trimmed off at each end."""

Phase = float | Callable[[int], float]


def run(
    phases: Mapping[str, Phase],
    *,
    other: Phase = 0.0,
    steps: int = STEPS,
    batches: str | None = "b",
    recipe: Mapping[str, Any] | None = None,
    strict: Mapping[str, Any] | None = None,
    soft: Mapping[str, Any] | None = None,
    more: Mapping[str, Phase] | None = None,
) -> Evidence:
    """A run whose step is the sum of its phases and `other`; `more` are further metrics."""
    at = range(1, steps + 1)

    def series(phase: Phase) -> list[float]:
        return [phase(step) if callable(phase) else phase for step in at]

    parts = {f"timing/train/{name}": series(phase) for name, phase in phases.items()}
    whole = [sum(values) for values in zip(*parts.values(), series(other), strict=True)]
    metrics = {
        "train/loss": series(2.0),
        "timing/train/step_time": whole,
        **parts,
        **{name: series(phase) for name, phase in (more or {}).items()},
    }
    record = RunRecord(
        run_id="r",
        case="case",
        started="2026-01-01T00:00:00+00:00",
        recipe=dict(recipe or {}),
        recipe_hash="h",
        batches={str(step): f"{batches}{step}" for step in at} if batches is not None else {},
        environment=Environment(strict=dict(strict or {}), soft=dict(soft or {})),
    )
    return Evidence(
        {name: Series(name, tuple(at), tuple(values)) for name, values in metrics.items()}, record
    )


def side(name: str, *runs: Evidence, profile: Profile | None = None) -> Side:
    """A side of these repeats."""
    folders = tuple(Path(f"{name}/{number}") for number in range(1, len(runs) + 1))
    return Side(name, folders, runs, profile)
