# SPDX-License-Identifier: Apache-2.0
"""Dialects: names and derived series."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.external.dialect import FOLDER, load_dialect

SUITE = Path("suites/x.yaml")
BUILT_IN = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_the_built_in_ones() -> None:
    assert BUILT_IN == ["common", "jsonl", "nemo-rl", "tensorboard"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_dialect_loads(name: str) -> None:
    dialect = load_dialect(name, SUITE)
    assert dialect.name == name
    assert dialect.derive["timing/train/step_time"].of == "timing/train/total_step_time"


def test_nemo_rl_takes_validation_and_checkpoints_out_of_the_step() -> None:
    """The numbers of https://github.com/NVIDIA-NeMo/RL/pull/1265: steps of 5 s, a save of 40 s at step 10."""
    total = {str(step): 45.0 if step == 10 else 5.0 for step in range(1, 21)}
    total["20"] = 8.0
    found = load_dialect("nemo-rl", SUITE).translated(
        {
            "timing/train/total_step_time": total,
            "timing/train/checkpointing": {"10": 40.0},
            "timing/validation/total_validation_time": {"0": 7.0, "20": 3.0},
            "validation/val_loss": {"0": 2.5, "20": 1.5},
            "ray/node.0.gpu.0.mem_gb": {"10": 50.0, "20": 52.0},
        }
    )
    assert found["timing/train/step_time"] == {str(step): 5.0 for step in range(1, 21)}
    assert found["validation/loss"] == {"0": 2.5, "20": 1.5}
    # Their own names stay, so that their checks read what they always read.
    assert found["validation/val_loss"] == {"0": 2.5, "20": 1.5}
    assert found["ray/node.0.gpu.0.mem_gb"] == {"10": 50.0, "20": 52.0}


def test_what_is_there_under_our_name_stays() -> None:
    dialect = load_dialect("jsonl", SUITE)
    found = dialect.translated(
        {
            "loss": {"1": 9.0},
            "train/loss": {"1": 1.0},
            "step_time": {"1": 2.0},
            "timing/train/total_step_time": {"1": 5.0},
        }
    )
    assert found["train/loss"] == {"1": 1.0}
    assert found["timing/train/step_time"] == {"1": 2.0}


def test_a_value_made_of_something_not_finite_is_null() -> None:
    found = load_dialect("common", SUITE).translated(
        {
            "timing/train/total_step_time": {"1": None, "2": 5.0, "3": 5.0},
            "timing/train/checkpointing": {"2": None},
        }
    )
    assert found["timing/train/step_time"] == {"1": None, "2": None, "3": 5.0}


def test_a_dialect_of_ones_own_lies_beside_the_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "description: ours\nformat: jsonl\nstep_key: iter\nnames:\n  train/loss: [ce, nll]\n"
    )
    dialect = load_dialect("mine.yaml", tmp_path / "suite.yaml")
    assert (dialect.name, dialect.step_key) == ("mine", "iter")
    assert dialect.translated({"nll": {"1": 3.0}})["train/loss"] == {"1": 3.0}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("description: x\nformat: csv\n", r"mine\.yaml:2: format: "),
        ("description: x\nformat: jsonl\nalias: {}\n", r"mine\.yaml:3: alias: "),
        ("format: jsonl\n", r"mine\.yaml: description: "),
        ("description: x\nformat: jsonl\nreader: os.system\n", r"mine\.yaml:3: reader: "),
    ],
)
def test_what_is_wrong_in_one_is_named(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=what):
        load_dialect("mine.yaml", tmp_path / "suite.yaml")
