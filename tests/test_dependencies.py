# SPDX-License-Identifier: Apache-2.0
"""What the entry points import: they must start at once, and must not need a training's libraries."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

TRAINING = ("torch", "transformers", "peft", "megatron")
HEAVY = {
    *TRAINING,
    "numpy",
    "scipy",
    "pydantic",
    "omegaconf",
    "hydra",
    "yaml",
    "jinja2",
    "tensorboard",
    "wandb",
}


@pytest.mark.parametrize("module", ["check_metrics", "lora_suite"])
def test_help_imports_nothing_heavy(module: str) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{module}', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")


@pytest.mark.parametrize("module", ["check_metrics", "lora_suite"])
def test_help_starts_in_under_three_tenths_of_a_second(module: str) -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time, not the wall clock: what the program costs, not what else the machine was doing.
    assert min(seconds() for _ in range(4)) < 0.3
