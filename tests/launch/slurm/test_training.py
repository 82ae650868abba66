# SPDX-License-Identifier: Apache-2.0
"""Real trainings over two nodes, both backends; a rank that dies; a run that is longer than its job."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.slurm.conftest import ROOT, Project, states

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(600)]

FSDP2, MEGATRON = "sft-tiny-llama-2n1c-fsdp2", "sft-tiny-llama-2n1c-megatron-tp2"
ONE_NODE = {FSDP2: "sft-tiny-llama-1n2c-fsdp2", MEGATRON: "sft-tiny-llama-1n2c-megatron-tp2"}
STEPS = 4

DRIVER = """#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
declare_case steps=4 minutes=5
train "$@"
check 'data["train/loss"]["4"] < 7'
"""
RECIPE = """
defaults: BASE.yaml
sft: {max_num_steps: 4, val_period: 0}
cluster: {num_nodes: 2, gpus_per_node: 1}
logger: {wandb: {name: NAME}}
"""


@pytest.fixture
def trainings(project: Project) -> Project:
    """The project with recipes and drivers of two nodes, in a git repository."""
    for folder in ("recipes", "scripts"):
        shutil.copytree(ROOT / folder, project.folder / folder)
    for stem, base in ONE_NODE.items():
        recipe = RECIPE.replace("BASE", base).replace("NAME", stem)
        (project.folder / "recipes" / f"{stem}.yaml").write_text(recipe)
        (project.folder / "scripts" / f"{stem}.sh").write_text(DRIVER)
    (project.folder / ".gitignore").write_text("/results/\n")
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message=First")
    return project


def git(project: Project, *words: str) -> None:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *words], cwd=project.folder, check=True, capture_output=True)


def write_suite(project: Project, text: object) -> Path:
    path = project.folder / "suites" / "two_nodes.yaml"
    path.write_text(json.dumps(text))
    return path


def test_both_backends_train_over_two_nodes_and_agree_and_a_dead_rank_is_named(trainings: Project) -> None:
    agree = {
        "name": "backends",
        "arms": {"dtensor": FSDP2, "megatron": MEGATRON},
        "allow": [
            "policy.dtensor_cfg",
            "policy.megatron_cfg",
            "policy.make_sequence_length_divisible_by",
        ],
        "checks": ['max_rel_diff(dtensor["train/loss"], megatron["train/loss"]) < 1e-4'],
    }
    killed = {"case": FSDP2, "overrides": []}
    suite = write_suite(trainings, {"name": "two nodes", "cases": [killed], "pairs": [agree]})
    status, verdict, output = trainings.run(suite)
    assert status == 0, output
    assert states(verdict) == {f"{FSDP2} 1": "PASS", f"{MEGATRON} 1": "PASS"}
    record = json.loads((trainings.results("two_nodes") / FSDP2 / "1" / "run.json").read_text())
    assert record["environment"]["soft"]["host"] == "node1"
    assert record["environment"]["strict"]["world_size"] == 2

    status, verdict, output = trainings.run(
        suite, "-k", "backends", "--arm", "dtensor:debug.faults.kill_rank_at=1:2"
    )
    assert status == 3, output
    (dead,) = (run for run in verdict["runs"] if run["case"] == FSDP2)
    assert dead["state"] == "ERROR"
    assert "rank 1" in dead["message"].splitlines()[0]
    assert "SIGKILL" in dead["message"].splitlines()[0]
    assert states(verdict)[f"{MEGATRON} 1"] == "PASS"
