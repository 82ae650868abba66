# SPDX-License-Identifier: Apache-2.0
"""The verdict at Weights & Biases, offline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_suite.campaign.tracker import figures, publish
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.plan.model import Plan
from tests.judge.helpers import FULL, LORA, make_case, make_plan
from tests.report.helpers import pair, run
from tests.train.wandb_file import records, run_of


def verdict(folder: Path) -> SuiteVerdict:
    runs = [run(FULL, 1), run(LORA, 1, state="FAIL")]
    return SuiteVerdict(
        suite="smoke", started="", seconds=1.0, directory=str(folder), runs=runs, pairs=[pair("fsdp2")]
    )


def logged_plan() -> Plan:
    case = make_case(FULL)
    logger = case.recipe.logger.model_copy(update={"wandb_enabled": True})
    recipe = case.recipe.model_copy(update={"logger": logger})
    return make_plan(cases={FULL: replace(case, recipe=recipe), LORA: make_case(LORA)})


def test_figures_are_the_states_and_ratios(tmp_path):
    assert dict(figures(verdict(tmp_path))) == {
        "verdict": "FAIL",
        "exit_code": 1,
        f"run/{FULL}/1": "PASS",
        f"run/{LORA}/1": "FAIL",
        "pair/fsdp2": "PASS",
        "pair/fsdp2/ratio_1": 0.9312,
    }


def test_what_nobody_logs_is_not_published(tmp_path):
    publish(make_plan(), verdict(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_verdict_is_the_summary_of_a_run_in_the_group_of_its_trainings(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    folder = tmp_path / "smoke" / "20260301-120000-abc"
    folder.mkdir(parents=True)
    publish(logged_plan(), verdict(folder))
    wandb.teardown()  # ends the process that writes the file, which may lag behind what it has confirmed
    (written,) = folder.glob("wandb/offline-run-*/*.wandb")
    described = run_of(written)
    assert (described.run_group, described.job_type, list(described.tags)) == (
        "smoke-20260301-120000-abc",
        "verdict",
        ["verdict"],
    )
    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records(written)
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["verdict"] == "FAIL"
    assert summary["exit_code"] == 1
    assert summary["pair/fsdp2/ratio_1"] == 0.9312
