# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out is an error with what was held, what was expected, and the key to change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_suite.blueprint import preflight
from lora_suite.judge.run import judge_run
from lora_suite.train.environment import peak_resident_gib
from lora_suite.train.out_of_memory import explain_memory, ran_out_of_memory
from tests.judge.helpers import FULL, make_case, planned
from tests.train.conftest import RECIPE, Run, small_recipe

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_what_means_that_memory_ran_out() -> None:
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert ran_out_of_memory(RuntimeError("CUDA driver error: out of memory"))
    assert not ran_out_of_memory(RuntimeError("shapes do not match"))
    assert not ran_out_of_memory(ValueError("out of memory"))


def test_a_real_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)


def test_an_explanation_has_peak_estimate_and_key() -> None:
    recipe = small_recipe("policy.train_micro_batch_size=4", "policy.precision=float32")
    said = explain_memory(recipe, preflight(recipe, RECIPE), CPU, fast=False)
    peak, expected, change = said.split("; ")
    found = re.fullmatch(r"peak (\d+\.\d\d) GiB resident on this rank", peak)
    assert found is not None
    assert float(found[1]) == pytest.approx(peak_resident_gib(), abs=0.1)
    assert re.fullmatch(r"the memory model expected 4\.7 MiB \(weights .*activations .*\)", expected)
    assert re.fullmatch(r"set policy\.train_micro_batch_size=1 \(then \d\.\d MiB by the model\)", change)


def test_a_model_of_unknown_shape_has_no_estimate() -> None:
    recipe = small_recipe()
    blueprint = replace(preflight(recipe, RECIPE), model=None)
    assert explain_memory(recipe, blueprint, CPU, fast=False).endswith(
        "; the model's shape is not known, so there is no estimate"
    )


def test_the_named_rank_runs_out_at_the_named_step(run: Run) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        run.train("debug.faults.out_of_memory_at='0:3'")
    assert list(run.metrics["train/loss"]) == ["1", "2"]


@pytest.mark.train
@pytest.mark.slow
def test_the_verdict_of_a_training_that_ran_out_says_what_to_change(tmp_path: Path) -> None:
    overrides = [
        *("sft.max_num_steps=4", "sft.val_period=0", "checkpointing.enabled=false"),
        *("policy.train_global_batch_size=8", "policy.train_micro_batch_size=4"),
        "debug.faults.out_of_memory_at='1:2'",
    ]
    environment = {"LORA_SUITE_RUN_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lora_suite", "train", "--config", str(RECIPE), *overrides],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    verdict = judge_run(make_case(FULL), planned(), tmp_path, ended=None)
    assert verdict.own_state == verdict.state == "ERROR"
    first = verdict.message.splitlines()[0]
    assert first.startswith("out of memory: rank 1, step 2: OutOfMemoryError: CUDA out of memory (planted")
    assert re.search(
        r"; peak \d\.\d\d GiB resident on this rank; the memory model expected .*\(weights ", first
    )
    assert re.search(r"; set policy\.train_micro_batch_size=1 \(then .* MiB by the model\)$", first)
