# SPDX-License-Identifier: Apache-2.0
"""A run that must take the fast path passes only if its record says that it did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_suite.config import load_recipe
from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import worst
from tests.judge.helpers import DONE, FULL, ROOT, make_case, planned, write_run

WHY = "policy.dtensor_cfg.tensor_parallel_size is above 1"


def judged(tmp_path: Path, path: dict[str, Any] | None, required: bool) -> dict[str, tuple[str, str]]:
    """State and message of the run's checks; path: what its record says of the fast path."""
    loaded = load_recipe(
        ROOT / "recipes" / f"{FULL}.yaml", [f"policy.require_fast_path={str(required).lower()}"]
    )
    case = replace(make_case(), recipe=loaded.recipe, tree=loaded.tree)

    def damage(metrics: dict[str, Any], record: dict[str, Any]) -> None:
        if path is not None:
            record["fast_path"] = {**path, "required": required}

    verdict = judge_run(case, planned(), write_run(tmp_path / "run", case, damage=damage), DONE)
    assert verdict.state == worst([check.state for check in verdict.checks])
    return {check.name: (check.state, check.message) for check in verdict.checks if check.kind != "check"}


@pytest.mark.parametrize(
    ("path", "state", "message"),
    [
        ({"taken": True, "reason": ""}, "PASS", "taken"),
        (
            {"taken": False, "reason": WHY},
            "FAIL",
            f"policy.require_fast_path is true, but it was not taken: {WHY}",
        ),
        (None, "MISSING", "not in run.json"),
    ],
)
def test_a_required_fast_path_is_judged(
    tmp_path: Path, path: dict[str, Any] | None, state: str, message: str
) -> None:
    assert judged(tmp_path, path, required=True) == {"fast_path": (state, message)}


@pytest.mark.parametrize("path", [{"taken": False, "reason": WHY}, None])
def test_a_fast_path_that_nobody_requires_is_not(tmp_path: Path, path: dict[str, Any] | None) -> None:
    assert judged(tmp_path, path, required=False) == {}
