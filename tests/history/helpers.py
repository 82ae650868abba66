# SPDX-License-Identifier: Apache-2.0
"""Nights made by hand: suite runs as facts, a night after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lora_suite.history.facts import PairFact, RunFact, SessionFact, Trace
from lora_suite.history.metrics import PEAK_MEMORY, policy_of
from lora_suite.history.series import NightSeries, SeriesNight
from lora_suite.history.store import Store
from lora_suite.plan.metric_names import LOSS, STEP_TIME

CASE = "sft-nightly-1n8g-fsdp2-lora"
RATIO = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"])'
H200 = {"device": "NVIDIA H200", "cuda": "12.8", "torch": "2.11.0"}


def started(night: int) -> str:
    """When a night began: the first on 1 January 2026, at three in the morning."""
    return (datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=night)).isoformat()


def run(night: int, value: float, **changes: Any) -> RunFact:
    """One run of one night with a step time."""
    facts: dict[str, Any] = {
        "case": CASE,
        "repeat": 1,
        "run_id": f"run-{night}",
        "started": started(night),
        "version": "recipe-a",
        "environment": "env-a",
        "code": f"c{night:04d}",
        "state": "PASS",
        "values": {STEP_TIME: value},
    }
    return RunFact(**facts | changes)


def session(night: int, runs: Sequence[RunFact], pairs: Sequence[PairFact] = ()) -> SessionFact:
    """One suite run."""
    return SessionFact(
        suite="smoke",
        name=f"night-{night}",
        started=started(night),
        seconds=60.0,
        exit_code=0,
        folder=f"results/smoke/{night}",
        runs=list(runs),
        pairs=list(pairs),
        environments={"env-a": H200, "env-b": {**H200, "torch": "2.12.0"}},
    )


def pair(ratios: Sequence[float], **changes: Any) -> PairFact:
    """One ratio of one night."""
    facts: dict[str, Any] = {
        "pair": "fsdp2",
        "expression": RATIO,
        "operator": "<",
        "version": "recipes-a",
        "environment": "env-a",
        "state": "PASS",
        "estimate": math.exp(sum(map(math.log, ratios)) / len(ratios)),
        "low": 0.5,
        "high": 1.5,
        "ratios": list(ratios),
    }
    return PairFact(**facts | changes)


def fill(store: Store, values: Sequence[float], **changes: Any) -> None:
    """Add a suite run a night, with one run of one case."""
    for night, value in enumerate(values):
        store.add(session(night, [run(night, value, **changes)]))


def noisy(nights: int, seed: int = 1, level: float = 0.1, noise: float = 0.005) -> list[float]:
    """A steady series with independent noise."""
    generator = random.Random(seed)
    return [level * math.exp(generator.gauss(0.0, noise)) for _ in range(nights)]


def series(values: Sequence[float], metric: str = STEP_TIME) -> NightSeries:
    """Nights without a store."""
    nights = [
        SeriesNight(f"s{at}", started(at), "recipe-a", "env-a", value, (value,), f"run-{at}", f"c{at:04d}")
        for at, value in enumerate(values)
    ]
    return NightSeries(CASE, metric, policy_of(metric), nights)


def large_history(nights: int, cases: int, steps: int) -> Iterator[SessionFact]:
    """Nights of `cases` cases, each with step time, loss, memory and one phase: four series a case."""
    generator = random.Random(7)
    metrics = (STEP_TIME, LOSS, PEAK_MEMORY, "timing/train/forward_backward")
    at = list(range(1, steps + 1))
    for night in range(nights):
        runs = []
        for case in range(cases):
            level = math.exp(generator.gauss(0.0, 0.005))
            values = [level * math.exp(generator.gauss(0.0, 0.015)) for _ in at]
            traces = {metric: Trace(steps=at, values=values) for metric in metrics}
            figures = dict.fromkeys(metrics, level)
            runs.append(
                run(
                    night,
                    level,
                    case=f"{CASE}-{case}",
                    run_id=f"run-{night}-{case}",
                    values=figures,
                    traces=traces,
                )
            )
        yield session(night, runs)


def store_of(path: Path, facts: Iterator[SessionFact]) -> Path:
    """A store with these suite runs."""
    with Store(path, create=True) as store:
        for fact in facts:
            store.add(fact)
    return path
