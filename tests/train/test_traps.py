# SPDX-License-Identifier: Apache-2.0
"""Published traps of trainers' own metrics, each with its thread; docs/traps.md lists them all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_suite.config.schema import WandbLogger
from lora_suite.launch.record import RunDir, RunRecord
from lora_suite.train import loop
from lora_suite.train.metrics import MetricsWriter
from lora_suite.train.reporter import Reporter, Speed, StepReport, Work
from lora_suite.train.sinks import JsonSink, WandbSink


class MonotonicWandb:
    """As much of wandb as the sink uses; what is not above the last step is dropped, as wandb once did."""

    class Error(Exception):
        pass

    class Settings:
        def __init__(self, **settings: Any) -> None:
            pass

    def __init__(self) -> None:
        self.history = {6: 0.0}
        self.settings = SimpleNamespace(mode="offline", sync_dir="wandb")

    def init(self, **arguments: Any) -> MonotonicWandb:
        return self

    def define_metric(self, *arguments: Any, **more: Any) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        if values["step"] > max(self.history):
            self.history[int(values["step"])] = values["train/loss"]

    def finish(self) -> None:
        pass


def test_steps_that_wandb_drops_after_a_resume_are_in_metrics_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/wandb/wandb/issues/4482: the run had logged up to step 6, and was resumed at 4
    wandb = MonotonicWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = WandbSink(WandbLogger(project="p", name="n"), tmp_path, {}, group="c", arm="lora")
    writer = MetricsWriter([JsonSink(tmp_path / "metrics.json"), tracker])
    for step in range(4, 9):
        writer.log(step, {"train/loss": float(step)})
    writer.close()
    assert sorted(wandb.history) == [6, 7, 8]
    written = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert written == {"train/loss": {str(step): float(step) for step in range(4, 9)}}


def performance(folder: Path, steps: range) -> dict[str, float]:
    """Throughput at step 4 of a training that took these steps: 16 slots, 10 tokens, 6 supervised in 2 s."""
    folder.mkdir()
    record = RunRecord(run_id="r", case="c", started="2026-01-01T00:00:00+00:00", recipe={}, recipe_hash="h")
    record.segments = [steps.start]
    sink = JsonSink(folder / "metrics.json")
    reporter = Reporter(record, RunDir(folder), MetricsWriter([sink]), Speed(1, None, None), last_step=4)
    for step in steps:
        reporter.step(
            StepReport(
                step=step,
                loss=2.0,
                grad_norm=1.0,
                lr=1e-3,
                work=Work(slots=16, tokens=10, supervised=6) if step == 4 else Work(64, 64, 64),
                batch=f"batch{step}",
                seconds=2.0 if step == 4 else 100.0,
                phases={},
                peaks={},
                lora={},
                validation_loss=None,
            )
        )
    reporter.close()
    series = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return {name: values["4"] for name, values in series.items() if name.startswith("performance/")}


def test_throughput_of_a_step_does_not_depend_on_what_was_logged_before(tmp_path: Path) -> None:
    # https://github.com/axolotl-ai-cloud/axolotl/pull/3072 divided by the logging interval;
    # https://github.com/hiyouga/LlamaFactory/issues/3646 was always 0
    assert performance(tmp_path / "all", range(1, 5)) == performance(tmp_path / "last", range(4, 5))
    assert performance(tmp_path / "two", range(3, 5)) == {
        "performance/slots_per_sec_per_gpu": 8.0,
        "performance/tokens_per_sec_per_gpu": 5.0,
        "performance/supervised_tokens_per_sec_per_gpu": 3.0,
    }


def test_allocated_and_reserved_memory_are_two_metrics_of_each_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # https://github.com/PrimeIntellect-ai/prime-rl/issues/1118: 5.2 GiB allocated, 7.8 reserved
    peaks = {"allocated": 5.2 * 2**30, "reserved": 7.8 * 2**30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peaks["reserved"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(allocated=2**30, reserved=2**31)
    )
    device = torch.device("cuda", 0)
    assert loop._figure_names(device) == ("memory/peak_allocated_gib", "memory/peak_reserved_gib")
    assert loop._memory_figures(device) == (5.2, 7.8)
    assert loop._memory_figures(device) == (1.0, 2.0)
