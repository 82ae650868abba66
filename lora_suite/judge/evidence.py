# SPDX-License-Identifier: Apache-2.0
"""What a run left behind, read from its directory: the source of truth that every judgement starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from check_metrics import MetricsError, Series, is_per_step, load_metrics
from check_metrics.series import describe_steps
from lora_suite.config import differences
from lora_suite.judge.verdict import CheckVerdict
from lora_suite.launch.record import RunDir, RunRecord, file_sha256
from lora_suite.plan.metric_names import LOSS, STEP_TIME, TOTAL_STEP_TIME, VALID_TOKENS, known
from lora_suite.plan.model import BaseCase

# What a run of our trainer writes at every step on every machine; without one of these it measured nothing.
REQUIRED_SERIES = (LOSS, VALID_TOKENS, TOTAL_STEP_TIME, STEP_TIME)
# What any trainer must say, because it tells how far the run came.
REQUIRED_OF_OTHERS = (LOSS,)


class NoEvidence(Exception):
    """A run directory holds nothing that can be judged; the text names the file and what is wrong with it."""


@dataclass(frozen=True)
class Evidence:
    """Metrics and record of one run, both readable; nothing is said yet about what is in them.

    metrics_sha256: of the metrics file that was read.
    """

    metrics: Mapping[str, Series]
    record: RunRecord
    metrics_sha256: str = ""

    @property
    def last_step(self) -> int:
        """Highest step that has a loss, 0 without any."""
        loss = self.metrics.get(LOSS)
        return loss.steps[-1] if loss is not None and loss.steps else 0

    @property
    def first_step(self) -> int:
        """First step that this run was to make: 1, or where it continued another run's checkpoint."""
        return min(self.record.segments, default=1)

    def measured(self, name: str, warmup: int, start: int | None = None, end: int = 0) -> dict[int, float]:
        """Values of a per-step series by step, less `warmup` steps of each segment; empty without a series.

        start, end: window as `check_metrics.Series.window` reads it.
        """
        warming = warmup_steps(self.record.segments, warmup)
        values = self.window(name, start, end)
        return {step: value for step, value in values.items() if step not in warming}

    def window(self, name: str, start: int | None = None, end: int = 0) -> dict[int, float]:
        """Values of a series by step, in a window as `check_metrics.Series.window` reads it."""
        series = self.metrics.get(name)
        if series is None:
            return {}
        window = series.window(start, end)
        return dict(zip(window.steps, window.values, strict=True))


def read_evidence(run_dir: Path) -> Evidence:
    """Read metrics.json and run.json of a run directory; raises NoEvidence."""
    files = RunDir(run_dir)
    if not run_dir.is_dir():
        raise NoEvidence("did not run")
    try:
        record = RunRecord.read(files.record)
    except OSError as error:
        raise NoEvidence(f"no {files.record.name}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise NoEvidence(f"{files.record.name} is damaged: {place}{first['msg']}") from error
    except UnicodeDecodeError as error:
        raise NoEvidence(f"{files.record.name} is damaged: {error}") from error
    try:
        metrics = load_metrics(files.metrics)
    except MetricsError as error:
        raise NoEvidence(str(error)) from error
    return Evidence(metrics, record, file_sha256(files.metrics))


def identity_problem(evidence: Evidence, case: BaseCase, launched: datetime | None) -> str | None:
    """Why these files are not those of the run that was planned and launched; None where they are."""
    record = evidence.record
    if record.case != case.stem:
        return f"run.json is of case {record.case}"
    for key, planned, ran in differences(case.tree, record.recipe):
        return f"run.json's recipe is not the planned one: {key} is {ran!r}, planned {planned!r}"
    if launched is not None:
        try:
            started = datetime.fromisoformat(record.started)
        except ValueError:
            return f"run.json has no start time: {record.started!r}"
        if started.tzinfo is None:
            started = started.astimezone()
        # Records may be written in whole seconds.
        if started < launched.replace(microsecond=0):
            return f"run.json is of an earlier run: started {record.started}, launched {launched.isoformat()}"
    if record.steps_done != evidence.last_step:
        return f"run.json counts {record.steps_done} steps, metrics.json has {evidence.last_step}"
    if record.metrics_sha256 not in (None, evidence.metrics_sha256):
        return "metrics.json is not the one that this run left: run.json has another hash of it"
    return None


def series_problems(evidence: Evidence, required: Sequence[str] = REQUIRED_SERIES) -> Iterator[CheckVerdict]:
    """What is wrong with the series themselves, whatever the checks ask: MISSING for holes, FAIL for NaN.

    required: what must be there. Another trainer may log at every k-th step only.
    """
    metrics = evidence.metrics
    for name in required:
        if name not in metrics:
            yield CheckVerdict(kind="series", name=name, state="MISSING", message="not in metrics.json")
    expected = range(evidence.first_step, evidence.last_step + 1)
    for name, series in metrics.items():
        if known(name) is None:
            continue
        if not series.steps:
            yield CheckVerdict(kind="series", name=name, state="MISSING", message="empty")
            continue
        lacking = _holes(evidence, series, expected) if is_per_step(name) else []
        if lacking:
            message = f"no value at step {describe_steps(lacking)}"
            yield CheckVerdict(kind="series", name=name, state="MISSING", message=message)
        broken = sorted({*series.nonfinite_steps(), *evidence.record.nonfinite.get(name, ())})
        if broken:
            message = f"not finite at step {describe_steps(broken)}"
            yield CheckVerdict(kind="series", name=name, state="FAIL", message=message)


def _holes(evidence: Evidence, series: Series, expected: range) -> list[int]:
    """The steps that a per-step series lacks; of an external run those between its own logging interval."""
    if evidence.record.dialect is None:
        return sorted(set(expected).difference(series.steps))
    return [step for hole in series.missing(expected.start, expected.stop) for step in hole]


def warmup_steps(segments: Iterable[int], warmup: int) -> frozenset[int]:
    """The first `warmup` steps of each segment (given by its first step): compilation, caches, allocator."""
    return frozenset(step for start in segments for step in range(start, start + warmup))
