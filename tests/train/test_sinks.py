# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: what metrics.json and event files hold afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lora_suite.train.metrics import MetricsWriter
from lora_suite.train.sinks import JsonSink, TensorBoardSink


def events(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [
        (tag, event.step, event.value)
        for tag in accumulator.Tags()["scalars"]
        for event in accumulator.Scalars(tag)
    ]


def test_a_value_that_is_not_finite_is_null_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    writer = MetricsWriter([JsonSink(path), TensorBoardSink(tmp_path / "tb")])
    writer.log(1, {"train/loss": 2.5, "train/grad_norm": math.inf})
    writer.log(2, {"train/loss": math.nan, "train/grad_norm": 1.0})
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    assert content == {"train/loss": {"1": 2.5, "2": None}, "train/grad_norm": {"1": None, "2": 1.0}}
    assert writer.nonfinite == {"train/grad_norm": [1], "train/loss": [2]}
    assert sorted(events(tmp_path / "tb")) == [("train/grad_norm", 2, 1.0), ("train/loss", 1, 2.5)]


def test_an_earlier_runs_file_is_gone_before_the_first_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text('{"train/loss": {"50": 0.1}}')
    JsonSink(path)
    assert json.loads(path.read_text()) == {}


def test_a_continued_file_forgets_what_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    old = {"a": {"1": 1.0, "2": 2.0, "3": 3.0}, "late": {"3": 9.0}, "ray/node.0.gpu.0.mem_gb": {"0": 5.0}}
    path.write_text(json.dumps(old))
    sink = JsonSink(path, keep_until=2)
    sink.log(3, {"a": 30.0})
    sink.close()
    assert json.loads(path.read_text()) == {"a": {"1": 1.0, "2": 2.0, "3": 30.0}}


def test_event_files_of_a_continued_run_have_one_value_a_step(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"a": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, keep_until=2)
    second.log(3, {"a": 30.0})
    second.close()
    assert events(tmp_path) == [("a", 1, 1.0), ("a", 2, 2.0), ("a", 3, 30.0)]
