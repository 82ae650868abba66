# SPDX-License-Identifier: Apache-2.0
"""Logs of one JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.launch.importers import import_metrics

DATA = Path(os.environ.get("LORA_SUITE_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.mark.parametrize("key", ["step", "iteration", "global_step"])
def test_every_usual_name_of_the_step(log: Path, key: str) -> None:
    write(log, f'{{"{key}": 1, "loss": 2.5}}', "", f'{{"loss": 2, "{key}": 2.0}}')
    assert import_metrics(log).metrics == {"loss": {"1": 2.5, "2": 2.0}}


def test_nested_objects_are_joined_with_a_slash(log: Path) -> None:
    write(log, '{"step": 1, "train": {"loss": 2.5, "time": {"total": 3}}, "lr": 1e-5}')
    assert import_metrics(log).metrics == {
        "lr": {"1": 1e-5},
        "train/loss": {"1": 2.5},
        "train/time/total": {"1": 3.0},
    }


def test_a_step_under_another_name_even_nested(log: Path) -> None:
    write(log, '{"trainer": {"at": 7}, "loss": 2.5, "step": 90}')
    assert import_metrics(log, step_key="trainer/at").metrics == {"loss": {"7": 2.5}, "step": {"7": 90.0}}


def test_every_spelling_of_not_finite_is_null(log: Path) -> None:
    spellings = ["NaN", "Infinity", "-Infinity", "null", '"nan"', '"inf"', "1e999"]
    write(log, *(f'{{"step": {step}, "loss": {text}}}' for step, text in enumerate(spellings, start=1)))
    imported = import_metrics(log, strict=True)
    assert imported.metrics == {"loss": dict.fromkeys("1234567")}
    assert imported.warnings == ("loss is not finite at step 1-7, which becomes null",)


def test_what_is_no_number_is_counted(log: Path) -> None:
    write(
        log,
        '{"step": 1, "loss": 2.5, "time": "2026-01-01T00:00", "warm": true, "shape": [1]}',
        '{"step": 2, "loss": 2.0, "time": "2026-01-01T00:01"}',
    )
    imported = import_metrics(log)
    assert imported.metrics == {"loss": {"1": 2.5, "2": 2.0}}
    (warning,) = imported.warnings
    assert warning.startswith("4 values are no numbers and are left out: time (2)")
    assert "warm (1)" in warning
    assert "shape (1)" in warning


def test_lines_without_a_step_are_counted(log: Path) -> None:
    write(log, '{"config": {"lr": 1}}', '{"step": 1, "loss": 2.5}', '{"done": 1}')
    imported = import_metrics(log)
    assert imported.metrics == {"loss": {"1": 2.5}}
    assert imported.warnings == (f"{log}: 2 lines have no 'step' and are left out",)


def test_of_two_lines_for_a_step_the_later_counts_unless_strict(log: Path) -> None:
    write(log, '{"step": 1, "loss": 2.5}', '{"step": 1, "loss": 2.0}', '{"step": 1, "accuracy": 0.5}')
    assert import_metrics(log).metrics == {"accuracy": {"1": 0.5}, "loss": {"1": 2.0}}
    with pytest.raises(ConfigError) as refused:
        import_metrics(log, strict=True)
    assert f"2.5 in {log}:1 and 2.0 in {log}:2" in str(refused.value)


def test_strict_accepts_lines_that_agree(log: Path) -> None:
    write(log, '{"step": 1, "loss": 2.5}', '{"step": 1, "loss": 2.5}')
    assert import_metrics(log, strict=True).metrics == {"loss": {"1": 2.5}}


def test_a_resumed_training_that_went_on_in_the_same_file(log: Path) -> None:
    # steps 1 to 6, resumed at 4 and stopped at 5: step 6 is of no training
    steps = [(step, 10 + step) for step in range(1, 7)] + [(4, 24), (5, 25)]
    write(log, *(f'{{"step": {step}, "loss": {loss}}}' for step, loss in steps))
    imported = import_metrics(log)
    assert imported.metrics == {"loss": {"1": 11.0, "2": 12.0, "3": 13.0, "4": 24.0, "5": 25.0}}
    assert imported.segments == (1, 4)
    assert imported.warnings == (f"{log}:7 goes on at step 4; 3 earlier values from there on are left out",)
    with pytest.raises(ConfigError, match=f"step 4: 14.0 in {log}:4 and 24.0 in {log}:7"):
        import_metrics(log, strict=True)


def test_a_validation_that_is_logged_late_is_no_resume(log: Path) -> None:
    write(
        log,
        '{"step": 1, "loss": 2.5}',
        '{"step": 2, "loss": 2.0}',
        '{"step": 1, "val": 3.0}',
        '{"step": 3, "loss": 1.5}',
        '{"step": 2, "val": 2.5}',
    )
    imported = import_metrics(log)
    assert imported.metrics == {"loss": {"1": 2.5, "2": 2.0, "3": 1.5}, "val": {"1": 3.0, "2": 2.5}}
    assert (imported.segments, imported.warnings) == ((1,), ())


def test_after_a_resume_every_metric_starts_anew(log: Path) -> None:
    first = [(1, "loss"), (2, "loss"), (3, "val"), (5, "loss"), (6, "val")]
    second = [(4, "loss"), (5, "loss"), (5, "val")]
    write(log, *(f'{{"step": {step}, "{name}": 1}}' for step, name in first + second))
    imported = import_metrics(log)
    assert imported.metrics == {
        "loss": {"1": 1.0, "2": 1.0, "4": 1.0, "5": 1.0},
        "val": {"3": 1.0, "5": 1.0},
    }
    assert imported.segments == (1, 4)


def test_a_last_line_that_a_killed_run_cut_off_is_a_warning(log: Path) -> None:
    log.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo', encoding="utf-8")
    imported = import_metrics(log)
    assert imported.metrics == {"loss": {"1": 2.5}}
    assert imported.warnings == (f"{log}:2: the last line is cut off and is left out",)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"step": 1, "a": 1}', '{"step": 2, "a'], ":2: not JSON"),
        (['{"step": 1, "a": 1}', "[1]"], ":2: no JSON object"),
        (['{"step": 1, "a": 1, "a": 2}', "{}"], ":1: .*'a' stands twice"),
        (['{"step": "one", "a": 1}', "{}"], ":1: 'step' is 'one', not a whole number"),
        (['{"step": 1.5, "a": 1}', "{}"], ":1: 'step' is 1.5, not a whole number"),
        (['{"step": true, "a": 1}', "{}"], ":1: 'step' is True, not a whole number"),
        (['{"step": -1, "a": 1}', "{}"], ":1: 'a' has step -1"),
        (['{"step": 1e300, "a": 1}', "{}"], ":1: 'a' has step 1000"),
        (['{"epoch": 1, "a": 1}', '{"epoch": 2, "a": 1}'], "no line has a step .*--step-key"),
        (['{"step": 1, "a": "x"}', "{}"], "no number to import"),
    ],
)
def test_what_is_wrong_is_named(log: Path, lines: list[str], reason: str) -> None:
    write(log, *lines)
    with pytest.raises(ConfigError, match=reason) as refused:
        import_metrics(log)
    assert str(log) in str(refused.value)


def test_very_deep_objects_end_in_a_message_or_a_name(log: Path) -> None:
    depth = 900
    write(log, '{"step": 1, "a": ' + '{"b": ' * depth + "1" + "}" * depth + "}", "")
    assert import_metrics(log, "jsonl").metrics == {"a" + "/b" * depth: {"1": 1.0}}


@pytest.mark.skipif(not DATA.exists(), reason="recorded series are not there")
def test_a_recorded_run_as_a_log_of_lines(log: Path) -> None:
    recorded = json.loads((DATA / "automodel_gemma3n_pair" / "lora.json").read_text(encoding="utf-8"))
    steps = sorted({int(step) for values in recorded.values() for step in values})
    write(
        log,
        *(
            json.dumps({"step": s, **{m: v[str(s)] for m, v in recorded.items() if str(s) in v}})
            for s in steps
        ),
    )
    assert import_metrics(log, strict=True).metrics == recorded
