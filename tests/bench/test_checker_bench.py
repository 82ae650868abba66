# SPDX-License-Identifier: Apache-2.0
"""Time and memory of 200 checks on a large metrics file: 100 series of 10,000 steps, 28 MB."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from check_metrics import evaluate, parse
from check_metrics.loading import open_metrics

ROOT = Path(__file__).parents[2]
SERIES, STEPS, CHECKS = 100, 10_000, 200
LIMIT_SECONDS = 2.0
LIMIT_FILE_SIZES = 6.0
pytestmark = pytest.mark.slow

# Peak resident size of the whole work less that of the interpreter with everything imported, in bytes.
# Linux counts the parent's peak into a child's ru_maxrss, so the child asks for the peak of its own memory.
MEASURE = """
import re, sys
from pathlib import Path
from tests.bench.test_checker_bench import check_all

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
check_all(Path(sys.argv[1]))
print(peak() - before)
"""
TEMPLATES = (
    'mean(data["{}"], 2) < 1e9',
    'median(data["{}"]) < 1e9',
    'max(data["{}"]) < 1e9',
    'mean(data["{}"], -6, -1) < 1e9',
    'data["{}"]["5000"] < 1e9',
    'ratio_above(data["{}"], 0.5) < 1e9',
    'mean(data["{}"], ignore_top_p=0.05) < 1e9',
    'percentile(data["{}"], 95) < 1e9',
    'slope(data["{}"]) < 1e9 and std(data["{}"]) < 1e9',
    'all_finite(data["{}"])',
)


def check_all(path: Path) -> int:
    """Read the file and judge every check; the number of passes."""
    arms = {"data": open_metrics(path)}
    names = [f"train/metric_{number % SERIES}" for number in range(CHECKS)]
    texts = [TEMPLATES[number % len(TEMPLATES)].replace("{}", name) for number, name in enumerate(names)]
    return sum(evaluate(parse(text), arms).status == "PASS" for text in texts)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers with as many digits as event files give."""
    generator = random.Random(3)
    document = {
        f"train/metric_{number}": {
            str(step): generator.lognormvariate(0.0, 0.3) for step in range(1, STEPS + 1)
        }
        for number in range(SERIES)
    }
    path = tmp_path_factory.mktemp("bench") / "metrics.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert 26e6 < path.stat().st_size < 32e6
    return path


@pytest.mark.benchmark(timer=time.process_time)
def test_time_of_200_checks(large_file: Path, benchmark: Any) -> None:
    assert benchmark.pedantic(check_all, args=(large_file,), rounds=5, warmup_rounds=1) == CHECKS
    if benchmark.stats is not None:
        assert benchmark.stats.stats.min < LIMIT_SECONDS


def test_memory_of_200_checks(large_file: Path, benchmark: Any) -> None:
    def peak() -> float:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(large_file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout) / large_file.stat().st_size

    file_sizes = benchmark.pedantic(peak, rounds=1)
    benchmark.extra_info["file_sizes"] = file_sizes
    assert 1.0 < file_sizes < LIMIT_FILE_SIZES
