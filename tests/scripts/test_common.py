# SPDX-License-Identifier: Apache-2.0
"""What every driver does, seen through real bash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.scripts.conftest import Project

SIMPLE = """\
declare_case steps=3 minutes=1
train "$@"
check 'data["train/loss"]["3"] < 2'
"""


def test_passing_run_exits_0_and_leaves_its_evidence(project: Project) -> None:
    done = project.run(project.driver(SIMPLE))
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout
    evidence = project.evidence()
    assert (evidence["status"], evidence["steps"], evidence["reached"]) == (0, 3, 3)
    # The stub's loss at step 3 is 4 - 3.
    assert [(check["status"], check["value"]) for check in evidence["checks"]] == [("PASS", 1.0)]


def test_failed_check_exits_1_and_later_checks_are_still_judged(project: Project) -> None:
    driver = project.driver(
        "declare_case steps=3 minutes=1\ntrain\n"
        'check \'data["train/loss"]["3"] < 0.5\'\ncheck \'data["train/loss"]["1"] < 5\'\n'
    )
    assert project.run(driver).returncode == 1
    assert [check["status"] for check in project.evidence()["checks"]] == ["FAIL", "PASS"]
    assert project.evidence()["status"] == 1


def test_words_reach_the_trainer_as_they_are(project: Project) -> None:
    words = [
        "a=[1, 2]",
        "b='x y'",
        "~policy.tokenizer.chat_template",
        "c=*",
        "d=",
        'e="q"',
        "$HOME",
        "--flag",
    ]
    assert project.run(project.driver(SIMPLE), *words).returncode == 0
    recipe = project.root / "recipes" / "sft-x-1n2c-fsdp2.yaml"
    assert json.loads((project.run_dir / "argv.json").read_text()) == [
        "train",
        "--config",
        str(recipe),
        *words,
    ]


@pytest.mark.parametrize("status", [2, 3, 42, 130])
def test_status_of_the_trainer_survives_tee_and_nothing_is_judged(project: Project, status: int) -> None:
    done = project.run(project.driver(SIMPLE), STUB_STATUS=str(status))
    assert done.returncode == status
    assert not (project.run_dir / "checks.json").exists()
    assert (project.run_dir / "train.log").read_text() == "the trainer speaks\n"


def test_unwritable_log_is_a_broken_run(project: Project) -> None:
    (project.run_dir / "train.log").mkdir(parents=True)
    done = project.run(project.driver(SIMPLE))
    assert done.returncode == 3
    assert "cannot write" in done.stderr


def test_short_run_exits_4_and_says_how_far_it_came(project: Project) -> None:
    done = project.run(project.driver(SIMPLE.replace("steps=3", "steps=30")))
    assert done.returncode == 4
    assert "reached 3 of 30 steps" in done.stderr
    assert project.evidence() == {"status": 4, "steps": 30, "reached": 3, "checks": []}


def test_short_run_of_a_driver_without_checks_exits_4(project: Project) -> None:
    done = project.run(project.driver("declare_case steps=30 minutes=1\ntrain\n"))
    assert done.returncode == 4
    assert "reached 3 of 30 steps" in done.stderr
    assert project.evidence() == {"status": 4, "steps": 30, "reached": 3, "checks": []}
    assert project.run(project.driver("declare_case steps=3 minutes=1\ntrain\n")).returncode == 0
    assert project.evidence() == {"status": 0, "steps": 3, "reached": 3, "checks": []}


@pytest.mark.parametrize("content", ["{}", '{"train/loss": {}}', "", "not json", "[]"])
def test_metrics_without_steps_never_pass(project: Project, content: str) -> None:
    stub = project.root / "stub_trainer.py"
    stub.write_text(stub.read_text() + f"(run_dir / 'metrics.json').write_text({content!r})\n")
    done = project.run(project.driver(SIMPLE))
    assert done.returncode == 4
    assert "reached 0 of 3 steps" in done.stderr


def test_metrics_of_another_run_are_refused(project: Project) -> None:
    done = project.run(project.driver(SIMPLE), STUB_RUN_ID="last-night")
    assert done.returncode == 4
    assert "is not of this run" in done.stderr


def test_check_before_train_is_refused_even_beside_good_metrics(project: Project) -> None:
    assert project.run(project.driver(SIMPLE)).returncode == 0
    done = project.run(project.driver(SIMPLE.replace('train "$@"\n', "")))
    assert done.returncode == 2
    assert "train must come before check" in done.stderr


def test_checkpoints_go_after_a_pass_and_stay_otherwise(project: Project) -> None:
    checkpoints = project.run_dir / "ckpts"
    project.run(project.driver(SIMPLE))
    assert not checkpoints.exists()
    project.run(project.driver(SIMPLE), LORA_SUITE_KEEP="1")
    assert checkpoints.exists()
    project.run(project.driver(SIMPLE), "--keep", "a=1")
    assert checkpoints.exists()
    assert json.loads((project.run_dir / "argv.json").read_text())[3:] == ["a=1"]
    project.run(project.driver(SIMPLE.replace("< 2", "< 0.5")))
    assert checkpoints.exists()


def test_run_directory_defaults_to_the_current_folder_from_anywhere(project: Project) -> None:
    elsewhere = project.root / "else where"
    elsewhere.mkdir()
    done = project.run(project.driver(SIMPLE), cwd=elsewhere, LORA_SUITE_RUN_DIR="")
    assert done.returncode == 0, done.stderr
    (run_dir,) = (elsewhere / "results" / "manual").iterdir()
    assert run_dir.name.endswith("-sft-x-1n2c-fsdp2")
    assert (run_dir / "checks.json").exists()


def test_conditions_choose_what_is_judged(project: Project) -> None:
    driver = project.driver(
        "declare_case steps=3 minutes=1\ntrain\n"
        'check --when policy.init=pretrained \'data["train/loss"]["1"] < 1\' '
        '--when policy.init=random \'data["train/loss"]["1"] < 4\' \'data["train/loss"]["2"] < 4\' '
        '--when flag=true \'data["train/loss"]["3"] < 4\'\n'
    )
    done = project.run(driver)
    assert done.returncode == 0, done.stderr
    assert 'not judged (policy.init=pretrained does not hold): data["train/loss"]["1"] < 1' in done.stdout
    judged = [check["check"] for check in project.evidence()["checks"]]
    assert judged == [f'data["train/loss"]["{step}"] < 4' for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("gpu", "status"), [("NVIDIA H200", 1), ("NVIDIA H100 80GB HBM3", 0), ("NVIDIA A100", 5)]
)
def test_limits_by_gpu_model(project: Project, gpu: str, status: int) -> None:
    driver = project.driver(
        "declare_case steps=3 minutes=1\ntrain\n"
        'check --on H200 \'data["train/loss"]["3"] < 0.5\' --on h100 \'data["train/loss"]["3"] < 2\'\n'
    )
    assert project.run(driver, STUB_GPU=gpu).returncode == status


def test_plan_mode_runs_nothing_and_prints_the_record(project: Project) -> None:
    body = """\
declare_case steps=50 minutes=2.5
train sft.val_period=5 "$@"
waive reason='slow on long rows' issue=https://example.org/1 owner=me until=2099-01-31 \\
  revert_to='max(data["a"]) < 1'
check 'max(data["a"]) < 2'
check --when policy.init=pretrained 'data["b"]["50"] < 1' \\
  --on H200 'data["b"]["50"] < 3'
"""
    record = project.plan(project.driver(body), "x=[1, 2]", "y='a b'")
    assert not project.run_dir.exists()
    assert (record["steps"], record["minutes"]) == (50, 2.5)
    assert record["train"] == [["sft.val_period=5", "x=[1, 2]", "y='a b'"]]
    first, second, third = record["checks"]
    assert first["waiver"] == {
        "reason": "slow on long rows",
        "issue": "https://example.org/1",
        "owner": "me",
        "until": "2099-01-31",
        "revert_to": 'max(data["a"]) < 1',
        "line": 5,
    }
    # Line 1 is the shebang, line 2 the source.
    assert (first["expression"], first["line"], first["when"], first["on"]) == (
        'max(data["a"]) < 2',
        7,
        None,
        None,
    )
    assert (second["when"], second["on"], second["line"]) == ("policy.init=pretrained", None, 8)
    assert (third["when"], third["on"]) == ("policy.init=pretrained", "H200")
    assert second["waiver"] is third["waiver"] is None


def test_waiver_counts_until_its_day_and_not_after(project: Project) -> None:
    body = """\
declare_case steps=3 minutes=1
train
waive reason=r issue=i owner=o until=UNTIL revert_to='data["train/loss"]["3"] < 0.5'
check 'data["train/loss"]["3"] < 2'
"""
    assert project.run(project.driver(body.replace("UNTIL", "2099-12-31"))).returncode == 0
    expired = project.run(project.driver(body.replace("UNTIL", "2020-12-31")))
    assert expired.returncode == 1
    assert "waiver expired" in expired.stderr
    assert project.evidence()["checks"][0]["check"] == 'data["train/loss"]["3"] < 0.5'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("declare_case steps=0 minutes=1\n", "steps='0'"),
        ("declare_case steps=3 minutes=0\n", "minutes='0'"),
        ("declare_case steps=3 minutes=1 gpus=8\n", "'gpus=8' is not steps=N or minutes=M"),
        ("train\n", "declare_case must come before train"),
        ("declare_case steps=3 minutes=1\ntrain\ncheck\n", "check wants at least one expression"),
        ("declare_case steps=3 minutes=1\ntrain\ncheck --when x 'a'\n", "--when wants KEY=VALUE"),
        ("declare_case steps=3 minutes=1\ntrain\ncheck a --on\n", "--on wants the model"),
        ("declare_case steps=3 minutes=1\nwaive reason=r\n", "issue= is missing"),
        (
            "declare_case steps=3 minutes=1\ntrain\n"
            "waive reason=r issue=i owner=o until=2099-01-01 revert_to=x\ncheck a b\n",
            "a check of its own",
        ),
        (
            "declare_case steps=3 minutes=1\nwaive reason=r issue=i owner=o until=soon revert_to=x\n",
            "YYYY-MM-DD",
        ),
        (":\n", "never called declare_case"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(project: Project, body: str, message: str) -> None:
    done = project.run(project.driver(body), LORA_SUITE_PLAN="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_missing_recipe_is_named(project: Project) -> None:
    driver = project.driver(SIMPLE)
    (project.root / "recipes" / "sft-x-1n2c-fsdp2.yaml").unlink()
    done = project.run(driver)
    assert done.returncode == 2
    assert "recipes/sft-x-1n2c-fsdp2.yaml" in done.stderr


def _path_with(folder: Path, *names: str) -> str:
    """A PATH that has only the named commands."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


def test_missing_jq_is_one_clear_line(project: Project) -> None:
    path = _path_with(project.root / "few", "bash", "dirname", "basename")
    done = project.run(project.driver(SIMPLE), PATH=path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "jq is missing" in done.stderr


def test_missing_command_is_named_and_the_project_environment_is_found(project: Project) -> None:
    path = _path_with(
        project.root / "few", "bash", "dirname", "basename", "jq", "date", "mkdir", "tee", "rm", "sh"
    )
    done = project.run(project.driver(SIMPLE), PATH=path)
    assert done.returncode == 2
    assert "neither on PATH nor in" in done.stderr
    (project.root / ".venv").mkdir()
    project.bin.rename(project.root / ".venv" / "bin")
    assert project.run(project.driver(SIMPLE), PATH=path).returncode == 0


def test_interrupt_ends_the_driver_with_130(project: Project) -> None:
    stub = project.root / "stub_trainer.py"
    waits = "import signal, time\ntry:\n    print('ready', flush=True); time.sleep(60)\n"
    stub.write_text(waits + "except KeyboardInterrupt:\n    print('last words'); sys.exit(130)\n")
    stub.write_text("import sys\n" + stub.read_text())
    driver = project.driver(SIMPLE)
    process = subprocess.Popen(
        ["bash", str(driver)],
        env={
            **os.environ,
            "PATH": f"{project.bin}{os.pathsep}{os.environ['PATH']}",
            "LORA_SUITE_RUN_DIR": str(project.run_dir),
        },
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "last words" in rest
