# SPDX-License-Identifier: Apache-2.0
"""trainer_state.json of transformers: names, the summary, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_suite.config import ConfigError
from lora_suite.launch.importers import import_metrics

HISTORY = [
    {"epoch": 0.1, "grad_norm": 3.5, "learning_rate": 1e-05, "loss": 2.5, "step": 10},
    {"epoch": 0.2, "grad_norm": float("nan"), "learning_rate": 5e-06, "loss": 2.25, "step": 20},
    {"epoch": 0.2, "eval_loss": 2.0, "eval_runtime": 4.0, "eval_samples_per_second": 8.0, "step": 20},
    {"epoch": 0.2, "step": 20, "total_flos": 1e12, "train_loss": 2.375, "train_runtime": 60.0},
]


def write(path: Path, history: Any) -> Path:
    document = {"best_metric": None, "global_step": 20, "log_history": history, "max_steps": 20}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_names_of_training_evaluation_and_summary(tmp_path: Path) -> None:
    imported = import_metrics(write(tmp_path / "trainer_state.json", HISTORY))
    assert imported.metrics == {
        "train/loss": {"10": 2.5, "20": 2.25},
        "train/grad_norm": {"10": 3.5, "20": None},
        "train/lr": {"10": 1e-05, "20": 5e-06},
        "train/epoch": {"10": 0.1, "20": 0.2},
        "validation/loss": {"20": 2.0},
        "validation/runtime": {"20": 4.0},
        "validation/samples_per_second": {"20": 8.0},
        "summary/epoch": {"20": 0.2},
        "summary/total_flos": {"20": 1e12},
        "summary/train_loss": {"20": 2.375},
        "summary/train_runtime": {"20": 60.0},
    }
    assert imported.warnings == ("train/grad_norm is not finite at step 20, which becomes null",)


@pytest.mark.slow
def test_what_transformers_itself_saves(tmp_path: Path) -> None:
    trainer_callback = pytest.importorskip("transformers.trainer_callback")
    state = trainer_callback.TrainerState(log_history=HISTORY)
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    assert import_metrics(tmp_path / "trainer_state.json").metrics["validation/loss"] == {"20": 2.0}


def test_values_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    history = [*HISTORY, {"step": 30, "loss": 1.0, "phase": "late", "shape": [1, 2]}]
    imported = import_metrics(write(tmp_path / "trainer_state.json", history))
    assert imported.metrics["train/loss"]["30"] == 1.0
    assert imported.warnings[0] == (
        "2 values are no numbers and are left out: train/phase (1), train/shape (1)"
    )


def test_an_evaluation_adds_nothing_to_the_training_s_metrics(tmp_path: Path) -> None:
    history = [*HISTORY, {"epoch": 0.25, "eval_loss": 1.75, "step": 25}]
    imported = import_metrics(write(tmp_path / "trainer_state.json", history))
    assert imported.metrics["validation/loss"] == {"20": 2.0, "25": 1.75}
    assert imported.metrics["train/epoch"] == {"10": 0.1, "20": 0.2}


def test_a_second_evaluation_of_a_step_counts_unless_strict(tmp_path: Path) -> None:
    path = write(tmp_path / "trainer_state.json", [*HISTORY, {"eval_loss": 1.75, "step": 20}])
    assert import_metrics(path).metrics["validation/loss"] == {"20": 1.75}
    with pytest.raises(ConfigError, match=r"log_history\[2\] and 1.75 in .*log_history\[4\]"):
        import_metrics(path, strict=True)


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ([{"loss": 1.0}], r"log_history\[0\] has no whole number under 'step'"),
        ([{"loss": 1.0, "step": 1.5}], r"log_history\[0\] has no whole number"),
        ([{"loss": 1.0, "step": 1}, "late"], r"log_history\[1\] has no whole number"),
        ({"loss": 1.0}, "no list log_history"),
        ([], "no number to import"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, history: Any, reason: str) -> None:
    path = write(tmp_path / "trainer_state.json", history)
    with pytest.raises(ConfigError, match=reason) as refused:
        import_metrics(path)
    assert str(path) in str(refused.value)
