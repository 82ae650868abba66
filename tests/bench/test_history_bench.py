# SPDX-License-Identifier: Apache-2.0
"""A history of 1,000 nights of 40 series of 50 steps: its size, and the time of a trend and of a night."""

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lora_suite.history.recording import suite_trends
from lora_suite.history.store import Store
from lora_suite.judge.verdict import RunVerdict, SuiteVerdict
from tests.history.helpers import CASE, large_history, started, store_of

NIGHTS, CASES, SERIES_A_CASE, STEPS = 1000, 10, 4, 50
LIMIT_BYTES = 200e6
LIMIT_TREND_SECONDS = 1.0
LIMIT_NIGHT_SECONDS = 10.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, made once."""
    path = tmp_path_factory.mktemp("bench") / "history.db"
    return store_of(path, large_history(NIGHTS, CASES, STEPS))


def test_size_of_the_store(large_store: Path, benchmark: Any) -> None:
    size = benchmark.pedantic(lambda: large_store.stat().st_size, rounds=1)
    benchmark.extra_info["megabytes"] = size / 1e6
    assert NIGHTS * CASES * SERIES_A_CASE * STEPS * 4 < size < LIMIT_BYTES


def children_seconds() -> float:
    """Processor time of all ended child processes: what a command takes on an idle machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.benchmark(timer=children_seconds)
def test_time_of_a_trend(large_store: Path, benchmark: Any) -> None:
    command = [sys.executable, "-m", "lora_suite", "trend", f"{CASE}-3", "--db", str(large_store)]

    def trend() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = benchmark.pedantic(trend, rounds=5, warmup_rounds=1)
    assert f"60 of {NIGHTS} nights" in done.stdout, done.stderr
    if benchmark.stats is not None:
        assert benchmark.stats.stats.min < LIMIT_TREND_SECONDS


@pytest.mark.benchmark(timer=time.process_time)
def test_time_of_a_night(large_store: Path, benchmark: Any) -> None:
    runs = [
        RunVerdict(case=f"{CASE}-{case}", repeat=1, pair=None, arm=None, state="PASS", steps_planned=STEPS)
        for case in range(CASES)
    ]
    verdict = SuiteVerdict(
        suite="smoke", started=started(NIGHTS - 1), seconds=60.0, directory="", runs=runs, pairs=[]
    )

    def judge() -> int:
        with Store(large_store) as store:
            return sum(len(trend.series.nights) for trend in suite_trends(store, verdict))

    # A suite run shows three of the four series.
    assert benchmark.pedantic(judge, rounds=1) == NIGHTS * CASES * 3
    if benchmark.stats is not None:
        assert benchmark.stats.stats.max < LIMIT_NIGHT_SECONDS
