# SPDX-License-Identifier: Apache-2.0
"""The facts behind the hashes that runs give."""

from __future__ import annotations

import json

from lora_suite.judge.environments import environment_facts
from lora_suite.judge.verdict import RunVerdict
from lora_suite.launch.record import Environment, RunDir, RunRecord


def run(directory, environment: str) -> RunVerdict:
    """A run that lies in a folder and names its environment."""
    return RunVerdict(
        case="c",
        repeat=1,
        pair=None,
        arm=None,
        state="PASS",
        steps_planned=1,
        directory=str(directory),
        environment=environment,
    )


def recorded(folder, strict: dict[str, object]):
    """A run directory with these strict facts."""
    folder.mkdir()
    environment = Environment(strict=strict, soft={"host": "h"})
    files = RunDir(folder)
    RunRecord(
        run_id="r",
        case="c",
        started="2026-01-01T00:00:00+00:00",
        recipe={},
        recipe_hash="",
        environment=environment,
    ).write(files.record)
    files.metrics.write_text(json.dumps({"train/loss": {"1": 1.0}}), encoding="utf-8")
    return folder


def test_each_environment_once_and_known_facts_alone(tmp_path):
    here = recorded(tmp_path / "a", {"device": "NVIDIA H200", "driver": None, "flags": {"tf32": True}})
    there = recorded(tmp_path / "b", {"device": "NVIDIA H100", "world_size": 8})
    runs = [run(here, "e1"), run(here, "e1"), run(there, "e2")]
    assert environment_facts(runs) == {
        "e1": {"device": "NVIDIA H200", "flags.tf32": "True"},
        "e2": {"device": "NVIDIA H100", "world_size": "8"},
    }


def test_runs_that_left_nothing_are_passed_over(tmp_path):
    here = recorded(tmp_path / "a", {"device": "cpu"})
    runs = [run(tmp_path / "gone", "e1"), run(here, "e1"), run(here, "")]
    assert environment_facts(runs) == {"e1": {"device": "cpu"}}
