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
    suite = write_suite(trainings, {"name": "two nodes", "pairs": [agree]})
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


# Stands in for torchrun: trains six steps, saves every second one, and goes on where it was.
TORCHRUN = """
import json, pathlib, sys, time
from datetime import UTC, datetime
from lora_suite.config.tree import recipe_hash
from lora_suite.judge.evidence import REQUIRED_SERIES
from lora_suite.launch.record import RunRecord, write_json_atomically
run = pathlib.Path(sys.argv[-1])
job = json.loads((run / "recipe.json").read_text())
ckpts = run / "ckpts"
ckpts.mkdir(exist_ok=True)
done = max((int(path.name.split("_")[1]) for path in ckpts.iterdir()), default=0)
metrics, segments = {name: {} for name in REQUIRED_SERIES}, []
if done:
    kept = json.loads((run / "metrics.json").read_text())
    metrics = {name: {s: v for s, v in kept[name].items() if int(s) <= done} for name in kept}
    segments = RunRecord.read(run / "run.json").segments
record = RunRecord(run_id=job["run_id"], case=job["case"], started=datetime.now(UTC).isoformat(),
                   recipe=job["tree"], recipe_hash=recipe_hash(job["tree"]), segments=[*segments, done + 1])
for step in range(done + 1, 7):
    time.sleep(SECONDS)
    for name in metrics:
        metrics[name][str(step)] = 1.0 + 0.1 * step + 0.01 * len(record.segments)
    write_json_atomically(run / "metrics.json", metrics)
    record.model_copy(update={"steps_done": step}).write(run / "run.json")
    if step % 2 == 0:
        (ckpts / f"step_{step}").mkdir()
"""
SEGMENTED = "sft-tiny-llama-1n2c-fsdp2-segmented"


def in_segments(project: Project, seconds: float, minutes: float) -> Path:
    """A suite with one case of three segments; a step of its stub takes so many seconds."""
    package = project.folder / "stand-in" / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN.replace("SECONDS", str(seconds)))
    project.environment["PYTHONPATH"] = f"{package.parents[1]}:{ROOT}"
    (project.folder / "recipes" / f"{SEGMENTED}.yaml").write_text(
        "defaults: sft-tiny-llama-1n2c-fsdp2.yaml\nsft: {max_num_steps: 6, val_period: 0}\n"
        "checkpointing: {enabled: true, save_period: 2, resume: true, metric_name: null}\n"
        f"logger: {{wandb: {{name: {SEGMENTED}}}}}\n"
    )
    driver = DRIVER.replace("steps=4 minutes=5", f"steps=6 minutes={minutes}").replace('"4"', '"6"')
    (project.folder / "scripts" / f"{SEGMENTED}.sh").write_text(driver)
    return write_suite(project, {"name": "long", "cases": [{"case": SEGMENTED, "segments": 3}]})


def test_a_run_longer_than_its_job_goes_on_in_the_next(trainings: Project) -> None:
    status, verdict, output = trainings.run(in_segments(trainings, seconds=4, minutes=0.75), "--keep")
    assert status == 0, output
    (run,) = verdict["runs"]
    assert (run["steps_done"], run["state"]) == (6, "PASS")
    folder = trainings.results("two_nodes")
    record = json.loads((folder / SEGMENTED / "1" / "run.json").read_text())
    first, second = record["segments"][:2]
    assert first == 1
    assert second in (3, 5)
    loss = json.loads((folder / SEGMENTED / "1" / "metrics.json").read_text())["train/loss"]
    # Each step has the value of the segment that trained it last.
    assert loss["1"] == pytest.approx(1.11)
    assert loss[str(second)] == pytest.approx(1.02 + 0.1 * second)
    jobs = [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]
    assert len({event["job"] for event in jobs if event["event"] == "submitted"}) >= 2


def test_a_segment_without_a_new_checkpoint_is_the_last(trainings: Project) -> None:
    status, verdict, output = trainings.run(in_segments(trainings, seconds=60, minutes=0.15))
    assert status == 3, output
    assert verdict["runs"][0]["message"].startswith("timeout: ran longer than 0.05 minutes")


def test_jobs_run_what_was_submitted_and_the_reference_beside_it(trainings: Project) -> None:
    """Two commits of a trainer, and a change after the submission that no job may see."""
    suite = trainings.suite({"one": "ok"}, nodes=2)
    git(trainings, "add", ".")
    git(trainings, "commit", "--quiet", "--message=Suite")
    trainer = trainings.folder / "suites" / "trainer.py"
    base = trainer.read_text()
    trainer.write_text(base.replace("0.1 + 0.001", "0.4 + 0.001"))
    trainings.slurm("scontrol", "update", "partitionname=debug", "state=down")
    try:
        process = trainings.submit(suite, "--ref", "HEAD", "--repeats", "2", "--keep")
        trainings.await_(lambda: trainings.queue())
        trainer.write_text("raise SystemExit('a later state')")
    finally:
        trainings.slurm("scontrol", "update", "partitionname=debug", "state=up")
    status, verdict, output = trainings.ended(process, "stub")
    assert status == 1, output
    check = verdict["pairs"][0]["checks"][0]
    # Four times as long a step, to which both add a thousandth: (0.4 + x) / (0.1 + x).
    assert 3.8 < check["effect"]["estimate"] < 4.0
    ran = [
        line.split()[1]
        for path in trainings.results("stub").rglob("ran.txt")
        for line in path.read_text().splitlines()
    ]
    # One more than measured: the first warms the nodes.
    assert len(ran) == 5
    assert len(set(ran)) == 1
