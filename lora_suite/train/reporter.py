# SPDX-License-Identifier: Apache-2.0
"""What rank 0 leaves behind and shows: metrics, run.json, progress."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_suite.blueprint.floor import Floor
from lora_suite.config.schema import Recipe
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import FloorTerms, Invariant, RunDir, RunRecord, file_sha256
from lora_suite.plan.metric_names import (
    FLOOR_RATIO,
    FLOOR_TIME,
    GRAD_NORM,
    LEAST_RECEIVED,
    LOSS,
    LR,
    PHASES,
    RECEIVED,
    STEP_TIME,
    TOTAL_STEP_TIME,
    VALID_TOKENS,
    VALIDATION_LOSS,
)
from lora_suite.train.console import Console
from lora_suite.train.metrics import MetricsWriter, Sink
from lora_suite.train.monitor import MemoryMonitor, Samples
from lora_suite.train.sinks import JsonSink, TensorBoardSink, WandbSink

_SECONDS_BETWEEN_WRITES = 2.0
_AFTER_THE_STEP = ("validation", "checkpointing")
_COUNTS = ("truncated", "dropped_no_target")


@dataclass(frozen=True)
class Work:
    """Size of a step over all ranks: padded slots, tokens that are not padding, tokens that carry loss."""

    slots: int
    tokens: int
    supervised: int


@dataclass(frozen=True)
class Peak:
    """Largest value of a memory figure over all ranks, and the rank that has it."""

    gib: float
    rank: int


@dataclass(frozen=True)
class StepReport:
    """One finished step.

    seconds: the whole step by the wall clock; phases: its parts. peaks: by metric name. lora: the `lora/…`
    metrics.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    work: Work
    batch: str
    seconds: float
    phases: Mapping[str, float]
    peaks: Mapping[str, Peak]
    lora: Mapping[str, float]
    validation_loss: float | None


@dataclass(frozen=True)
class Speed:
    """What turns seconds into performance metrics.

    world_size: GPUs (processes on a CPU machine). flops_per_slot: arithmetic of one token slot, None where
    the model's shape is not known. floor: of a step with so many slots, None without the GPU's peaks. link:
    bytes a second by which the floor's communication is reckoned, None where it is not NVLink's alone.
    """

    world_size: int
    flops_per_slot: float | None
    floor: Callable[[int], Floor] | None
    link: float | None = None

    def metrics(self, work: Work, seconds: float, received: float | None = None) -> dict[str, float]:
        """Throughput, arithmetic, floor ratio and traffic of a step that took `seconds`.

        received: GiB that came over NVLink, None where nobody counts.
        """
        gpu_seconds = seconds * self.world_size
        values = {
            "performance/slots_per_sec_per_gpu": work.slots / gpu_seconds,
            "performance/tokens_per_sec_per_gpu": work.tokens / gpu_seconds,
            "performance/supervised_tokens_per_sec_per_gpu": work.supervised / gpu_seconds,
        }
        if self.flops_per_slot is not None:
            values["performance/model_tflops_per_gpu"] = self.flops_per_slot * work.slots / gpu_seconds / 1e12
        if self.floor is not None:
            floor = self.floor(work.slots)
            values |= {FLOOR_TIME: floor.seconds, FLOOR_RATIO: seconds / floor.seconds}
            if received is not None and self.link is not None:
                values[LEAST_RECEIVED] = floor.communication * self.link / 2**30
        if received is not None:
            values[RECEIVED] = received
        return values


def open_sinks(recipe: Recipe, record: RunRecord, files: RunDir, keep_until: int | None) -> list[Sink]:
    """The sinks a recipe asks for; metrics.json always. keep_until: see `JsonSink`.

    The record gets the link of the run at Weights & Biases.
    """
    logger = recipe.logger
    sinks: list[Sink] = [JsonSink(files.metrics, keep_until)]
    if logger.tensorboard_enabled:
        folder = files.tensorboard if logger.log_dir is None else Path(logger.log_dir)
        sinks.append(TensorBoardSink(folder, keep_until))
    if logger.wandb_enabled:
        arm = "lora" if recipe.policy.lora.enabled else "full"
        tracker = WandbSink(logger.wandb, files.root, record.recipe, group=record.case, arm=arm)
        record.link = tracker.link
        sinks.append(tracker)
    return sinks


class Reporter:
    """Takes one report a step; writes metrics.json and run.json every few seconds and at the end.

    last_step: where the training will end. monitor: of this node's memory, asked every `sample_interval`
    seconds. received: what this rank's GPU has received from others up to now, in GiB.
    """

    def __init__(
        self,
        record: RunRecord,
        files: RunDir,
        writer: MetricsWriter,
        speed: Speed,
        last_step: int,
        monitor: MemoryMonitor | None = None,
        sample_interval: float = _SECONDS_BETWEEN_WRITES,
        received: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.record = record
        # What a continued run's record says is true of the metrics that it continues.
        record.metrics_sha256 = None
        self._files = files
        self._writer = writer
        self._speed = speed
        self._monitor = monitor
        self._sample_interval = sample_interval
        self._sampled = time.monotonic()
        self._received = received
        self._counter: float | None = None
        self._traffic: float | None = None
        self._last_step = last_step
        self._first_step = record.segments[-1]
        self._console = Console()
        self._began = time.monotonic()
        self._written = self._began
        self._nonfinite = record.nonfinite
        self._peaks = _earlier_peaks(record, files.metrics)
        self.flush()
        self._progress(Progress(self._first_step - 1, last_step, None, None))

    def start_clock(self) -> None:
        """Say that the first step begins now; the time left is reckoned from here."""
        self._began = time.monotonic()

    def begin(self) -> None:
        """Say that a step is about to begin."""
        self._counter = self._received()

    def end(self) -> None:
        """Say that the step's own work is done, before what may come after it, such as a validation."""
        now = self._received()
        self._traffic = now - self._counter if now is not None and self._counter is not None else None

    def step(self, report: StepReport) -> None:
        """Take a finished step."""
        self._writer.log(report.step, self._metrics(report))
        self.record.steps_done = report.step
        self.record.batches[str(report.step)] = report.batch
        if self._speed.floor is not None:
            floor = self._speed.floor(report.work.slots)
            self.record.floor = FloorTerms(**asdict(floor), bound_by=floor.bound_by)
        for name, peak in report.peaks.items():
            known = self._peaks.get(name)
            if known is None or peak.gib > known.gib:
                self._peaks[name] = peak
        self._progress(self._look(report))
        if self._monitor is not None and time.monotonic() - self._sampled >= self._sample_interval:
            self._sampled = time.monotonic()
            self.samples(self._monitor.take())
        saved = report.phases.get("checkpointing", 0.0) > 0.0
        if saved or time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES:
            self.flush()

    def validation(self, step: int, loss: float) -> None:
        """Take a validation that belongs to no step: the one before the first."""
        self._writer.log(step, {VALIDATION_LOSS: loss})

    def samples(self, samples: Samples) -> None:
        """Take sampled metrics, keyed by seconds."""
        for second, values in samples.items():
            self._writer.log(second, values)

    def invariants(self, invariants: list[Invariant]) -> None:
        """Put what was measured into the record; of two measurements of one name the newer counts."""
        by_name = {each.name: each for each in (*self.record.invariants, *invariants)}
        self.record.invariants = list(by_name.values())

    def flush(self) -> None:
        """Write everything taken so far."""
        self._writer.flush()
        self.record.nonfinite = merge_steps(self._nonfinite, self._writer.nonfinite)
        self.record.peak_rank = {name: peak.rank for name, peak in self._peaks.items()}
        self.record.write(self._files.record)
        self._written = time.monotonic()

    def close(self) -> None:
        """Write everything a last time and let go of files and terminal."""
        self._console.close()
        self.flush()
        self._writer.close()
        self.record.metrics_sha256 = file_sha256(self._files.metrics)
        self.record.write(self._files.record)

    def _metrics(self, report: StepReport) -> dict[str, float]:
        phases = {phase: report.phases.get(phase, 0.0) for phase in PHASES}
        step_time = report.seconds - sum(phases[phase] for phase in _AFTER_THE_STEP)
        values = {
            LOSS: report.loss,
            GRAD_NORM: report.grad_norm,
            LR: report.lr,
            VALID_TOKENS: float(report.work.supervised),
            TOTAL_STEP_TIME: report.seconds,
            STEP_TIME: step_time,
            **{f"timing/train/{phase}": seconds for phase, seconds in phases.items()},
            **self._speed.metrics(report.work, step_time, self._traffic),
            **{name: peak.gib for name, peak in report.peaks.items()},
            **report.lora,
            **{f"data/{name}": float(self.record.data[name]) for name in _COUNTS if name in self.record.data},
        }
        if report.validation_loss is not None:
            values[VALIDATION_LOSS] = report.validation_loss
        return values

    def _look(self, report: StepReport) -> Progress:
        done = report.step - self._first_step + 1
        each = (time.monotonic() - self._began) / done
        loss = report.loss if math.isfinite(report.loss) else None
        return Progress(report.step, self._last_step, loss, each * (self._last_step - report.step))

    def _progress(self, progress: Progress) -> None:
        progress.write(self._files.root)
        if progress.step >= self._first_step:
            self._console.show(progress)


def _earlier_peaks(record: RunRecord, metrics: Path) -> dict[str, Peak]:
    """Peaks of the segments that are continued: values from metrics.json, ranks from run.json."""
    if not record.peak_rank:
        return {}
    series = json.loads(metrics.read_text(encoding="utf-8"))
    kept = {
        name: [value for value in series.get(name, {}).values() if value is not None]
        for name in record.peak_rank
    }
    return {name: Peak(max(values), record.peak_rank[name]) for name, values in kept.items() if values}


def merge_steps(*parts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Steps by metric of all parts, in order."""
    merged: dict[str, set[int]] = {}
    for part in parts:
        for name, steps in part.items():
            merged.setdefault(name, set()).update(steps)
    return {name: sorted(steps) for name, steps in merged.items()}
