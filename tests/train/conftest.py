# SPDX-License-Identifier: Apache-2.0
"""Runs of the training program in this process, with a backend as small as can be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lora_suite.config import load_recipe
from lora_suite.config.schema import Recipe
from lora_suite.launch.record import RunRecord
from lora_suite.train.program import Build, Program
from tests.train.fake_backend import build

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "sft-tiny-llama-1n2c-fsdp2.yaml"
SMALL = (
    "cluster.gpus_per_node=1",
    "sft.max_num_steps=4",
    "sft.val_period=0",
    "sft.val_at_end=false",
    "policy.train_global_batch_size=4",
    "policy.train_micro_batch_size=2",
    "policy.precision=float64",
    "logger.tensorboard_enabled=false",
)
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"


def small_recipe(*overrides: str) -> Recipe:
    """The tiny recipe on one process, four steps, in float64."""
    return load_recipe(RECIPE, [*SMALL, *overrides]).recipe


class Run:
    """A run directory in which the training program can be run again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(self, *overrides: str, backend: Build = build, run_id: str = "run-1") -> int:
        """Write recipe.json as the launcher does, and train; returns the exit status."""
        self.write_job(*overrides, run_id=run_id)
        return Program(self.folder, backend).run()

    def write_job(self, *overrides: str, run_id: str = "run-1") -> None:
        """Write recipe.json as the launcher does."""
        self.folder.mkdir(exist_ok=True)
        tree = load_recipe(RECIPE, [*SMALL, *overrides]).tree
        job = {"case": RECIPE.stem, "run_id": run_id, "recipe_path": str(RECIPE), "tree": tree}
        (self.folder / "recipe.json").write_text(json.dumps(job))

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Content of metrics.json."""
        content: dict[str, dict[str, Any]] = json.loads((self.folder / "metrics.json").read_text())
        return content

    @property
    def record(self) -> RunRecord:
        """Content of run.json."""
        return RunRecord.read(self.folder / "run.json")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of the only rank of a torchrun, and its process group gone afterwards."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def new_run(one_process: None, tmp_path: Path) -> Callable[[str], Run]:
    """Makes run directories by name."""
    return lambda name: Run(tmp_path / name)


@pytest.fixture
def run(new_run: Callable[[str], Run]) -> Run:
    """One run directory."""
    return new_run("run")
