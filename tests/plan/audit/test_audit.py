# SPDX-License-Identifier: Apache-2.0
"""The miniature repository holds each defect once: all are found, and no other; a large one takes seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.plan.audit import audit
from lora_suite.plan.audit.finding import KINDS

MINIATURE = Path(__file__).resolve().parents[2] / "miniature"
SCRIPTS = "tests/test_suites/llm/"
RECIPES = "examples/configs/recipes/llm/"

# Written down beside the files: kind, file, line.
PLANTED = {
    ("skipped-checks", f"{SCRIPTS}sft-tiny-llama-1n8g-megatron.sh", 26),
    ("exit-before-checks", f"{SCRIPTS}sft-tiny-llama-1n8g-megatron-lora.sh", 15),
    ("swallowed-failure", f"{SCRIPTS}sft-tiny-mixtral-1n8g-megatron.sh", 24),
    ("pipe-before-pipefail", f"{SCRIPTS}grpo-tiny-llama-1n8g-fsdp2.sh", 23),
    ("cannot-fail", f"{SCRIPTS}dpo-tiny-llama-1n8g-fsdp2.sh", 29),
    ("unreachable-step", f"{SCRIPTS}sft-tiny-qwen-1n8g-fsdp2-long.sh", 28),
    ("unparsable-check", f"{SCRIPTS}sft-tiny-mixtral-1n8g-megatron.sh", 30),
    ("incomparable-arms", f"{SCRIPTS}sft-nano-30ba3b-2n8g-fsdp2-lora.sh", 0),
    ("resources", f"{SCRIPTS}sft-nano-30ba3b-2n8g-fsdp2.sh", 7),
    ("minutes", f"{SCRIPTS}sft-tiny-mixtral-1n8g-megatron.sh", 29),
    ("leaking-variable", f"{SCRIPTS}sft-tiny-qwen-1n8g-fsdp2-long.sh", 6),
    ("stale-note", f"{SCRIPTS}grpo-tiny-llama-1n8g-fsdp2.sh", 34),
    ("unquoted-arguments", f"{SCRIPTS}dpo-tiny-llama-1n8g-fsdp2.sh", 21),
    ("missing-recipe", f"{SCRIPTS}grpo-tiny-llama-1n8g-fsdp2.sh", 0),
    ("unreadable-script", f"{SCRIPTS}sft-tiny-phi-1n8g-fsdp2.sh", 29),
    ("unreadable-recipe", f"{RECIPES}dpo-tiny-llama-1n8g-fsdp2.yaml", 2),
    ("gpu-hours", ".", 0),
}


def test_every_planted_defect_is_found_and_no_other():
    report = audit(MINIATURE)
    found = [(each.kind, each.file.as_posix(), each.line) for each in report.findings]
    assert sorted(found) == sorted(PLANTED)
    assert {kind for kind, _, _ in found} == set(KINDS)
    assert report.scripts == len(list((MINIATURE / SCRIPTS).glob("*.sh"))) == 12


def test_arms_are_named_with_both_values():
    (pair,) = [each for each in audit(MINIATURE).findings if each.kind == "incomparable-arms"]
    assert pair.details == ("NUM_NODES: 2 and 1", "policy.dtensor_cfg.expert_parallel_size: 1 and 8")
    assert "against sft-nano-30ba3b-2n8g-fsdp2 it differs in NUM_NODES: 2 and 1; policy." in pair.message


def test_gpu_hours_by_hand():
    hours = audit(MINIATURE).gpu_hours
    # nightly.txt: seven scripts of 8 GPUs × 30 min, and one of 4 GPUs × 25 min, of whose 5/3 h 1 is counted.
    assert hours["nightly.txt"].exact == 7 * 4 + Fraction(5, 3)
    assert hours["nightly.txt"].floored == 7 * 4 + 1
    # Beside those: 4 h and 8 h of the nano pair, and 8 GPUs × 15 min = 2 h. One script is not readable.
    assert hours["all scripts"].exact == hours["nightly.txt"].exact + 4 + 8 + 2
    assert hours["all scripts"].unknown == 0


def test_nothing_is_executed(tmp_path):
    """A repository whose every file would leave a trace if it ran."""
    root = shutil.copytree(MINIATURE, tmp_path / "repository")
    trace = tmp_path / "trace"
    for path in [*root.rglob("*.sh"), *root.rglob("common.env")]:
        text = path.read_text()
        path.write_text(text.replace("# SPDX", f"touch {trace} $(touch {trace}) `touch {trace}`\n# SPDX", 1))
    base = root / "examples/configs/sft.yaml"
    base.write_text(base.read_text() + f"trap: {{_target_: os.system, command: touch {trace}}}\n")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert len(audit(root).findings) >= len(PLANTED)
    assert not trace.exists()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_folder_of_scripts_alone_can_be_audited():
    kinds = {each.kind for each in audit(MINIATURE / SCRIPTS).findings}
    assert kinds == set(KINDS)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda folder: folder / "absent", "there is no such folder"),
        (lambda folder: folder, "holds no script with a CONFIG block or a call of check_metrics"),
    ],
)
def test_nothing_to_audit(tmp_path, build, message):
    (tmp_path / "other.sh").write_text("echo hello\n")
    with pytest.raises(ConfigError, match=message):
        audit(build(tmp_path))


@pytest.mark.slow
def test_250_scripts_take_less_than_a_minute(tmp_path):
    """The miniature's readable scripts and recipes, copied until there are 250, each a little different."""
    root = shutil.copytree(MINIATURE, tmp_path / "repository")
    scripts = sorted((root / SCRIPTS).glob("*.sh"))
    for number in range(250 - len(scripts)):
        script = scripts[number % len(scripts)]
        recipe = root / RECIPES / f"{script.stem}.yaml"
        stem = f"{script.stem}-v{number}"
        limit = f"< {30 + number}"
        script.with_stem(stem).write_text(script.read_text().replace("< 30", limit))
        if recipe.is_file():
            recipe.with_stem(stem).write_text(recipe.read_text() + f"extra: {{number: {number}}}\n")
    began = time.monotonic()
    report = audit(root)
    assert time.monotonic() - began < 60
    assert report.scripts == 250
    assert len(report.findings) > 250


@pytest.mark.slow
def test_the_miniature_s_scripts_run(tmp_path):
    """A healthy script trains with the stub, imports its event files, and passes; a short one does not."""
    root = shutil.copytree(MINIATURE, tmp_path / "repository")
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    stem = "sft-tiny-llama-1n8g-fsdp2-lora"
    script = root / SCRIPTS / f"{stem}.sh"

    def run(*words: str) -> int:
        return subprocess.run([script, *words], env=environment, capture_output=True, check=False).returncode

    assert run() == 0
    metrics = json.loads((root / SCRIPTS / stem / "metrics.json").read_text())
    assert list(metrics["validation/val_loss"]) == ["0", "10", "20"]
    assert metrics["timing/train/total_step_time"]["10"] == 7.0
    shutil.rmtree(root / SCRIPTS / stem)
    assert run("sft.max_num_steps=3") == 1
