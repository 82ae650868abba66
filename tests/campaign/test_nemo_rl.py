# SPDX-License-Identifier: Apache-2.0
"""A repository in NeMo-RL's shape under a suite, with a stub in place of its training program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lora_suite.campaign.run import Request, run_suite
from tests.plan.external.conftest import WHOLE, Repository

# The family's common.env in few words. `uv run` stands for three programs that a script calls: the first of
# them only says so, the last says that every check holds, whatever they are.
COMMON = """
set -eou pipefail
PROJECT_ROOT=$(realpath $SCRIPT_DIR/../../..)
EXP_NAME=$(basename $0 .sh)
EXP_DIR=$SCRIPT_DIR/$EXP_NAME
LOG_DIR=$EXP_DIR/logs
CKPT_DIR=$EXP_DIR/ckpts
JSON_METRICS=$EXP_DIR/metrics.json
RUN_LOG=$EXP_DIR/run.log
CONFIG_PATH=$PROJECT_ROOT/examples/configs/recipes/llm/$EXP_NAME.yaml
mkdir -p $EXP_DIR $LOG_DIR $CKPT_DIR
exit_if_max_steps_reached() {
  if [[ -f $PROJECT_ROOT/already_done ]]; then
    echo "Target step $MAX_STEPS reached, skipping run"
    rm -r $EXP_DIR
    exit 0
  fi
}
uv() {
  case $2 in
    */run_sft.py) echo "training $*" ;;
    */json_dump_tb_logs.py) cp $PROJECT_ROOT/metrics.json $JSON_METRICS ;;
    */check_metrics.py) echo "all checks hold" ;;
  esac
}
"""
NAME = "sft-a-1n1g"
SUITE = f"""
name: x
cases:
- case: theirs
  external: {{command: bash tests/test_suites/llm/{NAME}.sh, cwd: their, dialect: nemo-rl}}
"""


def metrics(steps: int, loss: float = 0.5) -> dict[str, dict[str, float]]:
    """What its training leaves: validation at step 0 and 50, within the time of its step."""
    per_step = {str(step): 1.0 for step in range(1, steps + 1)}
    return {
        "train/loss": {**dict.fromkeys(per_step, loss), "1": 0.9},
        "train/global_valid_toks": per_step,
        "timing/train/total_step_time": {step: 25.0 if step == "50" else 5.0 for step in per_step},
        "timing/validation/total_validation_time": {"0": 20.0, "50": 20.0},
        "validation/val_loss": {"0": 2.0, "50": 1.0},
        "ray/node.0.gpu.0.mem_gb": {"10": 40.0, "20": 50.0},
    }


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "their")
    folder = made.script(NAME, WHOLE.replace("NUM_NODES=2", "NUM_NODES=1\nGPUS_PER_NODE=1")).parent
    (folder / "common.env").write_text(COMMON)
    made.recipe(
        NAME, "sft: {max_num_steps: 1}\nlogger: {log_dir: x}\npolicy: {tokenizer: {chat_template: x}}\n"
    )
    (tmp_path / "suite.yaml").write_text(SUITE)
    return made


def run(repository: Repository, written: dict[str, Any]) -> tuple[int, dict[str, Any], Path]:
    """Exit code, the run's verdict, its directory."""
    (repository.root / "metrics.json").write_text(json.dumps(written))
    folder = repository.root.parent
    code = run_suite(Request(folder / "suite.yaml", results=folder / "results"), console=Console(quiet=True))
    (verdict,) = folder.glob("results/*/*/verdict.json")
    (one,) = json.loads(verdict.read_text())["runs"]
    return code, one, Path(one["directory"])


def test_a_run_that_holds_its_checks_passes(repository: Repository) -> None:
    code, verdict, folder = run(repository, metrics(50))
    assert (code, verdict["state"]) == (0, "PASS"), verdict
    assert [check["state"] for check in verdict["checks"]] == ["PASS"] * 3
    assert verdict["checks"][0]["source"].endswith(f"{NAME}.sh:28")
    assert verdict["summary"]["median_step_time"] == 5.0
    found = json.loads((folder / "metrics.json").read_text())
    assert found["timing/train/step_time"]["50"] == 5.0
    assert found["validation/loss"] == {"0": 2.0, "50": 1.0}
    results = repository.root / f"tests/test_suites/llm/{NAME}"
    assert not results.exists()
    assert (
        (folder / "outputs" / results.relative_to(repository.root) / "run.log")
        .read_text()
        .startswith("training")
    )


def test_checks_that_a_short_run_skips_are_missed(repository: Repository) -> None:
    """Its guard lets a run of 3 steps end with 0."""
    code, verdict, _ = run(repository, metrics(3))
    assert (code, verdict["state"], verdict["message"]) == (4, "MISSING", "reached 3 of 50 steps")


def test_checks_are_judged_by_us_whatever_the_script_says(repository: Repository) -> None:
    code, verdict, _ = run(repository, metrics(50, loss=0.95))
    assert (code, verdict["state"]) == (1, "FAIL")
    assert [check["state"] for check in verdict["checks"]] == ["PASS", "FAIL", "PASS"]


def test_already_done_is_an_error(repository: Repository) -> None:
    (repository.root / "already_done").touch()
    code, verdict, _ = run(repository, metrics(50))
    assert (code, verdict["state"]) == (3, "ERROR")
    assert "left no new outputs" in verdict["message"]
    assert "Target step 50 reached, skipping run" in verdict["message"]
