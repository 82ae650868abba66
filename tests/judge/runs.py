# SPDX-License-Identifier: Apache-2.0
"""A run that is what it should be, or damaged in one way, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import RunVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.model import DeclaredCheck
from tests.judge.helpers import DONE, FULL, STEPS, Damage, make_case, planned, write_run


def judged(
    tmp_path: Path,
    damage: Damage | None = None,
    *,
    stem: str = FULL,
    ended: Ended | None = DONE,
    checks: tuple[DeclaredCheck, ...] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> RunVerdict:
    """Write one damaged run and judge it."""
    case = make_case(stem, checks)
    run_dir = write_run(tmp_path / "run", case, steps=steps, damage=damage)
    return judge_run(case, planned(stem), run_dir, ended, **options)


def cut(name: str, *steps: int) -> Damage:
    """Remove steps of a series."""

    def damage(metrics, record):
        for step in steps:
            del metrics[name][str(step)]

    return damage


def put(name: str, step: int, value: Any) -> Damage:
    """Replace one value."""

    def damage(metrics, record):
        metrics[name][str(step)] = value

    return damage


def drop(name: str) -> Damage:
    """Remove a series."""
    return lambda metrics, record: metrics.pop(name)


def empty(name: str) -> Damage:
    """Empty a series."""
    return lambda metrics, record: metrics[name].clear()


def record(**changes: Any) -> Damage:
    """Change the record."""
    return lambda metrics, record: record.update(changes)
