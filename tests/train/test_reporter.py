# SPDX-License-Identifier: Apache-2.0
"""What rank 0 leaves behind: metrics by hand, run.json, progress, and what a person sees."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_suite.blueprint.floor import Floor
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import FloorTerms, RunDir, RunRecord
from lora_suite.plan.metric_names import known
from lora_suite.train.console import describe
from lora_suite.train.metrics import MetricsWriter
from lora_suite.train.reporter import Peak, Reporter, Speed, StepReport, Work, merge_steps
from lora_suite.train.sinks import JsonSink

# Two rows of 3 and 7 real tokens in 8 slots each, 6 of them supervised, in 2 seconds.
WORK = Work(slots=16, tokens=10, supervised=6)


def report(step: int, loss: float = 2.0, gib: float = 1.0, rank: int = 0) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        work=WORK,
        batch=f"batch{step}",
        seconds=3.5,
        phases={
            "data": 0.25,
            "forward_backward": 1.0,
            "grad_sync": 0.25,
            "optimizer": 0.5,
            "validation": 1.5,
        },
        peaks={"memory/peak_allocated_gib": Peak(gib, rank)},
        lora={},
        validation_loss=3.0,
    )


def reporter(
    folder: Path, speed: Speed | None = None, received: Callable[[], float | None] = lambda: None
) -> Reporter:
    record = RunRecord(run_id="r", case="c", started="2026-01-01T00:00:00+00:00", recipe={}, recipe_hash="h")
    files = RunDir(folder)
    writer = MetricsWriter([JsonSink(files.metrics)])
    return Reporter(record, files, writer, speed or Speed(1, None, None), last_step=4, received=received)


def values(folder: Path, step: int = 1) -> dict[str, float]:
    content = json.loads((folder / "metrics.json").read_text())
    return {name: series[str(step)] for name, series in content.items()}


def test_throughput_counts_slots_tokens_and_supervised_tokens_apart(tmp_path: Path) -> None:
    # https://github.com/huggingface/transformers/issues/29889
    taker = reporter(tmp_path)
    taker.step(report(1))
    taker.close()
    metrics = values(tmp_path)
    assert metrics["timing/train/total_step_time"] == 3.5
    assert metrics["timing/train/step_time"] == 2.0
    assert metrics["timing/train/checkpointing"] == 0.0
    assert metrics["performance/slots_per_sec_per_gpu"] == 8.0
    assert metrics["performance/tokens_per_sec_per_gpu"] == 5.0
    assert metrics["performance/supervised_tokens_per_sec_per_gpu"] == 3.0
    assert metrics["train/global_valid_toks"] == 6
    assert metrics["validation/loss"] == 3.0
    assert "performance/model_tflops_per_gpu" not in metrics
    assert all(known(name) for name in metrics)


def test_arithmetic_and_floor_are_per_gpu() -> None:
    # 16 slots of 3e12 operations on 4 GPUs in 2 s are 6 TFLOP/s each.
    speed = Speed(world_size=4, flops_per_slot=3e12, floor=lambda slots: Floor(slots / 32, 0.1, 0.2, 0.5))
    metrics = speed.metrics(WORK, 2.0)
    assert metrics["performance/model_tflops_per_gpu"] == pytest.approx(6.0)
    assert metrics["performance/floor_seconds"] == pytest.approx(1.0)
    assert metrics["performance/floor_ratio"] == pytest.approx(2.0)
    assert metrics["performance/tokens_per_sec_per_gpu"] == pytest.approx(1.25)


def test_what_a_step_received_leaves_out_what_comes_after_it(tmp_path: Path) -> None:
    # The counter at the beginnings and ends of two steps: a validation between them moved 5 GiB.
    counter = iter([10.0, 12.5, 17.5, 20.0])
    # 0.5 s at 4 GiB a second.
    speed = Speed(2, None, lambda slots: Floor(slots / 64, 0.75, 0.5, 0.5), link=4.0 * 2**30)
    taker = reporter(tmp_path, speed, received=lambda: next(counter))
    for step in (1, 2):
        taker.begin()
        taker.end()
        taker.step(report(step))
    taker.close()
    for step in (1, 2):
        metrics = values(tmp_path, step)
        assert (metrics["traffic/received_gib"], metrics["traffic/floor_gib"]) == (2.5, 2.0)
        assert all(known(name) for name in metrics)


def test_traffic_that_nobody_counts_is_no_metric(tmp_path: Path) -> None:
    taker = reporter(tmp_path, Speed(1, None, lambda slots: Floor(slots / 64, 0.75, 0.5, 0.5), link=1.0))
    taker.begin()
    taker.end()
    taker.step(report(1))
    taker.close()
    assert not [name for name in values(tmp_path) if name.startswith("traffic/")]


def test_the_record_has_the_terms_of_the_floor(tmp_path: Path) -> None:
    taker = reporter(tmp_path, Speed(1, None, lambda slots: Floor(slots / 64, 0.75, 0.25, 0.5)))
    taker.step(report(1))
    taker.close()
    record = RunRecord.read(tmp_path / "run.json")
    assert record.floor == FloorTerms(
        arithmetic=0.25, memory=0.75, communication=0.25, update=0.5, bound_by="memory"
    )
    assert values(tmp_path)["performance/floor_ratio"] == pytest.approx(2.0 / 1.25)


def test_the_record_names_the_rank_of_each_peak_and_the_bad_steps(tmp_path: Path) -> None:
    taker = reporter(tmp_path)
    taker.step(report(1, gib=2.0, rank=3))
    taker.step(report(2, gib=1.0, rank=1, loss=math.nan))
    taker.close()
    record = RunRecord.read(tmp_path / "run.json")
    assert record.peak_rank == {"memory/peak_allocated_gib": 3}
    assert record.nonfinite == {"train/loss": [2]}
    assert record.batches == {"1": "batch1", "2": "batch2"}
    assert record.steps_done == 2
    assert values(tmp_path, 2)["train/loss"] is None


def test_a_continued_run_knows_the_peak_of_what_it_continues(tmp_path: Path) -> None:
    taker = reporter(tmp_path)
    taker.step(report(1, gib=2.0, rank=3))
    taker.step(report(2, gib=1.0, rank=1))
    taker.close()
    files = RunDir(tmp_path)

    def go_on(gib: float) -> dict[str, int]:
        record = RunRecord.read(files.record)
        sink = JsonSink(files.metrics, keep_until=2)
        more = Reporter(record, files, MetricsWriter([sink]), Speed(1, None, None), last_step=4)
        more.step(report(3, gib=gib, rank=0))
        more.close()
        return RunRecord.read(files.record).peak_rank

    assert go_on(1.5) == {"memory/peak_allocated_gib": 3}
    assert go_on(2.5) == {"memory/peak_allocated_gib": 0}


def test_what_became_of_the_rows_is_a_metric(tmp_path: Path) -> None:
    taker = reporter(tmp_path)
    taker.record.data = {"rows": 9, "examined": 8, "truncated": 2, "dropped_no_target": 1}
    taker.step(report(1))
    taker.close()
    metrics = values(tmp_path)
    assert (metrics["data/truncated"], metrics["data/dropped_no_target"]) == (2.0, 1.0)
    assert all(known(name) for name in metrics)


def test_files_are_there_before_the_first_step(tmp_path: Path) -> None:
    reporter(tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text()) == {}
    assert RunRecord.read(tmp_path / "run.json").steps_done == 0
    assert Progress.read(tmp_path) == Progress(0, 4, None, None)


def test_the_record_knows_the_metrics_that_the_run_left(tmp_path: Path) -> None:
    taker = reporter(tmp_path)
    taker.step(report(1))
    assert RunRecord.read(tmp_path / "run.json").metrics_sha256 is None
    taker.close()
    written = hashlib.sha256((tmp_path / "metrics.json").read_bytes()).hexdigest()
    assert RunRecord.read(tmp_path / "run.json").metrics_sha256 == written


def test_a_continued_run_forgets_the_hash_of_what_it_continues(tmp_path: Path) -> None:
    reporter(tmp_path).close()
    record = RunRecord.read(tmp_path / "run.json")
    assert record.metrics_sha256 is not None
    files = RunDir(tmp_path)
    Reporter(record, files, MetricsWriter([JsonSink(files.metrics)]), Speed(1, None, None), last_step=4)
    assert RunRecord.read(tmp_path / "run.json").metrics_sha256 is None


def test_progress_goes_with_every_step(tmp_path: Path) -> None:
    taker = reporter(tmp_path)
    taker.step(report(1))
    taker.step(report(2, loss=math.inf))
    look = Progress.read(tmp_path)
    assert look is not None
    assert (look.step, look.steps, look.loss) == (2, 4, None)
    assert look.seconds_left is not None
    assert look.seconds_left >= 0


def test_a_log_gets_the_first_and_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taker = reporter(tmp_path)
    for step in range(1, 5):
        taker.step(report(step))
    taker.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 4/4"]
    assert "loss 2.0000" in lines[0]


def test_a_terminal_gets_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    taker = reporter(tmp_path)
    for step in range(1, 5):
        taker.step(report(step))
    taker.close()
    shown = capsys.readouterr().out
    assert "loss 2.0000  0:00 left" in shown
    assert "step 1/4" not in shown  # that would be a log's line


def test_words_for_a_person() -> None:
    assert describe(Progress(1, 9, 1.23456, 125.4)) == "loss 1.2346  2:05 left"
    assert describe(Progress(1, 9, None, None)) == "loss not finite"


def test_steps_of_two_segments_are_joined() -> None:
    assert merge_steps({"a": [3, 1]}, {"a": [3, 5], "b": [2]}) == {"a": [1, 3, 5], "b": [2]}
