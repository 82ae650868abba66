# SPDX-License-Identifier: Apache-2.0
"""Suites with cases of another trainer, from suite file to exit code, with a stub in place of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lora_suite.campaign.preview import preview
from lora_suite.campaign.run import Request, run_suite
from lora_suite.config import ConfigError

# Writes three steps of metrics; its word is the step time.
TRAINER = """
import json, pathlib, sys
steps = ["1", "2", "3"]
pathlib.Path("out").mkdir()
json.dump(
    {
        "train/loss": dict(zip(steps, [3.0, 2.0, 1.0])),
        "train/global_valid_toks": dict(zip(steps, [10, 20, 30])),
        "timing/train/step_time": {step: float(sys.argv[1]) for step in steps},
    },
    open("out/metrics.json", "w"),
)
"""
CASE = """
- case: {name}
  external:
    command: ['{{python}}', train.py, '{seconds}']
    outputs: [out]
    metrics: out/metrics.json
    steps: 3
    minutes: 1
    gpus: 1
    declares: {{model: m, tokens_per_step: 64, lora: {lora}}}
"""
PAIR = """
pairs:
- name: p
  arms: {full: full, lora: lora}
"""
BROKEN = """
- case: broken
  external: {command: bash broken.sh, dialect: nemo-rl}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "broken.sh").write_text("echo 'never ends\n")
    path = tmp_path / "suite.yaml"
    full, lora = (
        CASE.format(name=n, seconds=s, lora=f) for n, s, f in (("full", 2, "false"), ("lora", 1, "true"))
    )
    path.write_text(f"name: x\nrepeats: 2\nwarmup: 1\ncases:{full}{lora}{PAIR}")
    return path


def run(suite: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    results = suite.parent / "results"
    code = run_suite(Request(suite, results=results, **options), console=Console(quiet=True))
    (verdict,) = results.glob("*/*/verdict.json")
    return code, json.loads(verdict.read_text())


def test_a_pair_of_external_arms_gets_a_verdict(suite: Path) -> None:
    code, verdict = run(suite)
    assert code == 0
    (pair,) = verdict["pairs"]
    assert pair["checks"][0]["effect"]["estimate"] == pytest.approx(0.5)
    # The first warmed the machine: kept, and no part of the verdict.
    folders = suite.parent.glob("results/*/*/*/*/outputs/out/metrics.json")
    assert sorted(path.parts[-4] for path in folders) == ["0", "1", "1", "2", "2"]
    assert len(verdict["runs"]) == 4
    assert not (suite.parent / "out").exists()


def test_a_script_that_cannot_be_read_is_missing_and_the_others_run(suite: Path) -> None:
    suite.write_text(suite.read_text().replace("pairs:", f"{BROKEN}pairs:"))
    code, verdict = run(suite)
    assert code == 4
    states = {run["case"]: run["state"] for run in verdict["runs"]}
    assert states == {"full": "PASS", "lora": "PASS", "broken": "MISSING"}
    broken = next(run for run in verdict["runs"] if run["case"] == "broken")
    assert f"{suite.parent}/broken.sh:1: not readable as bash: the quote ' never ends" == broken["message"]
    assert verdict["pairs"][0]["state"] == "PASS"


def test_leftovers_stop_everything_before_anything_runs(suite: Path) -> None:
    (suite.parent / "out").mkdir()
    with pytest.raises(ConfigError, match=r"(?s)move these away first:.*/out \(case lora\)"):
        run(suite)
    assert not (suite.parent / "results").exists()


def test_preview_shows_commands_facts_and_what_cannot_be_read(suite: Path) -> None:
    console = Console(record=True, width=200)
    suite.write_text(suite.read_text().replace("pairs:", f"{BROKEN}pairs:"))
    assert preview(Request(suite), console) == 4
    text = console.export_text()
    assert f"train.py 2 in {suite.parent}, read as common" in text
    assert "differs: lora (False and True)" in text
    assert "LoRA invariants: not measured" in text
    assert "broken: CANNOT BE READ, its runs are MISSING: " in text
    assert not (suite.parent / "out").exists()


def test_the_last_line_of_the_log_is_shown_of_a_run_that_broke(suite: Path) -> None:
    suite.write_text(suite.read_text().replace("train.py, '1'", "train.py"))
    code, verdict = run(suite)
    assert code == 3
    broken = next(run for run in verdict["runs"] if run["case"] == "lora")
    assert "IndexError" in broken["message"]
    assert verdict["pairs"][0]["own_state"] == "MISSING"
