# SPDX-License-Identifier: Apache-2.0
"""Real backends, one process: what a run logs is right, and a run in two parts equals one without a break.

https://github.com/huggingface/lerobot/issues/3459 resumed cleanly and began anew;
https://github.com/radixark/miles/issues/2705 restored weights, but not what the optimizer updates.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from lora_suite.blueprint import Blueprint
from lora_suite.config.schema import Recipe
from lora_suite.train.backends.base import Backend
from lora_suite.train.batch import IGNORED
from lora_suite.train.data.load import load_data
from lora_suite.train.program import NOTHING_TO_DO, build_backend
from tests.train.conftest import RECIPE, Run, small_recipe
from tests.train.megatron import reference

pytestmark = [pytest.mark.slow, pytest.mark.train]

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("policy.precision=float32", "policy.train_global_batch_size=8", "policy.optimizer.kwargs.eps=1e-8")
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
PACKED = "policy.sequence_packing.enabled=true"
SAVE = ("checkpointing.enabled=true", "checkpointing.metric_name=null", "checkpointing.save_period=2")


def lora(backend: str) -> tuple[str, ...]:
    """Adapters whose dropout draws random numbers in every step."""
    block = f"policy.{backend}_cfg.lora_cfg"
    return (f"{block}.enabled=true", f"{block}.dropout=0.1")


ARMS = {
    "dtensor full": (),
    "dtensor lora packed": (*lora("dtensor"), PACKED),
    "megatron full packed": (*MEGATRON, PACKED),
    "megatron lora": (*MEGATRON, *lora("megatron")),
    "megatron lora packed": (*MEGATRON, *lora("megatron"), PACKED),
}


def build(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> Backend:
    """The recipe's own backend; megatron-core's groups of an earlier run in this process are gone."""
    if recipe.policy.backend == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    return build_backend(recipe, recipe_path, blueprint, device)


def independent_loss() -> float:
    """The mean loss of the first batch: transformers' model, row by row, torch's cross-entropy."""
    batch = load_data(small_recipe(*COMMON), RECIPE).steps[0]
    model, total = reference.tiny_llama(), 0.0
    for example in batch.examples:
        ids = torch.from_numpy(example.tokens.astype("int64"))
        targets = ids[1:].masked_fill(~torch.from_numpy(example.learnt[1:]), IGNORED)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()
    return total / batch.supervised


@pytest.mark.parametrize("arm", ARMS)
def test_two_parts_equal_one_run_bit_for_bit(new_run: Callable[[str], Run], arm: str) -> None:
    straight, halved = new_run("straight"), new_run("halved")
    overrides = (*COMMON, *ARMS[arm], "sft.val_period=2")
    straight.train(*overrides, backend=build)
    halved.train(*overrides, *SAVE, "debug.faults.stop_at=2", backend=build)
    halved.train(*overrides, *SAVE, backend=build, run_id="run-2")

    for name in ("train/loss", "train/grad_norm", "train/lr", "validation/loss"):
        assert halved.metrics[name] == straight.metrics[name], name
    assert halved.record.batches == straight.record.batches
    assert halved.record.segments == [1, 3]
    assert all(each.ok for each in halved.record.invariants)
    losses = straight.metrics["train/loss"]
    assert losses["1"] == pytest.approx(independent_loss(), rel=1e-5)
    assert losses["4"] != losses["1"]

    before = (halved.folder / "metrics.json").read_bytes()
    assert halved.train(*overrides, *SAVE, backend=build, run_id="run-3") == NOTHING_TO_DO
    assert (halved.folder / "metrics.json").read_bytes() == before
    assert halved.record.run_id == "run-2"


def test_packed_and_unpacked_rows_train_the_same(new_run: Callable[[str], Run]) -> None:
    runs: list[Run] = []
    for name, more in (("rows", ()), ("packed", (PACKED,)), ("packed by two", (PACKED,))):
        micro = 2 if name.endswith("two") else 1
        runs.append(new_run(name))
        runs[-1].train(
            *COMMON,
            "policy.precision=float64",
            "policy.dtensor_cfg.lora_cfg.enabled=true",
            f"policy.train_micro_batch_size={micro}",
            *more,
            backend=build,
        )
    rows, *packed = runs
    for run in packed:
        # A pair of the two is comparable: fingerprints are of rows, not of where they stand.
        assert run.record.batches == rows.record.batches
        for name in ("train/loss", "train/grad_norm", "train/global_valid_toks"):
            assert run.metrics[name] == {
                step: pytest.approx(value, rel=1e-9) for step, value in rows.metrics[name].items()
            }


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_base_weights_are_read_once_and_adapters_survive_them(
    new_run: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    # https://github.com/NVIDIA-NeMo/RL/pull/2075 read the base a second time, after the adapters were there
    model: Any = reference.tiny_llama()
    model.float().save_pretrained(tmp_path / "model")
    reads: list[Any] = []
    for name in ("models.causal_lm._read_pretrained", "backends.megatron.construct.stored"):
        module, _, function = f"lora_suite.train.{name}".rpartition(".")
        original = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(f"{module}.{function}", counting(original, reads))
    run = new_run("run")
    arm = (
        *COMMON,
        *(MEGATRON if backend == "megatron" else ()),
        *lora(backend),
        f"policy.model_name={tmp_path / 'model'}",
        "policy.init=pretrained",
        "policy.tokenizer.name=bytes",
    )
    run.train(*arm, *SAVE, "debug.faults.stop_at=2", backend=build)
    assert len(reads) == 1
    kept: list[Backend] = []

    def build_and_keep(*arguments: Any) -> Backend:
        kept.append(build(*arguments))
        return kept[0]

    saved = torch.load(run.folder / "ckpts" / "step_2" / "rank_0.pt", weights_only=True)["backend"]
    run.train(*arm, *SAVE, "debug.faults.stop_at=3", backend=build_and_keep)
    assert len(reads) == 2
    bank = kept[0].bank
    assert bank is not None
    # One step of Adam moves no value further than about its learning rate.
    distance = max(
        float((bank.master[slot.start : slot.stop] - saved["factors"][slot.key]).abs().max())
        for slot in bank.slots
    )
    assert 0.0 < distance < 4 * max(run.metrics["train/lr"].values())
    assert all(each.ok for each in run.record.invariants if each.name == "frozen_unchanged")


def counting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, which notes every call."""

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call


TRAIN = """
import sys
from pathlib import Path
import torch
from lora_suite.train.program import Program
from tests.train.fake_backend import build

save = torch.save
def slow_save(state, path):
    save(state, path)
    print("saved", path, flush=True)
    if len(sys.argv) > 2 and f"step_{sys.argv[2]}" in str(path):
        Path(path).write_bytes(Path(path).read_bytes()[:100])
        sys.stdin.read()
torch.save = slow_save
sys.exit(Program(Path(sys.argv[1]), build).run())
"""


def start(run: Run, *arguments: Any) -> subprocess.Popen[str]:
    """The only rank of a torchrun, in a process of its own; it halts within the save of the given step."""
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(run.folder), *map(str, arguments)],
        env={**os.environ, **ranks, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )


def test_a_kill_within_a_save_leaves_the_checkpoint_before_it(new_run: Callable[[str], Run]) -> None:
    straight, killed = new_run("straight"), new_run("killed")
    arm = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.precision=float32")
    straight.train(*arm)
    killed.write_job(*arm, *SAVE, "checkpointing.save_period=1")
    process = start(killed, 3)
    assert process.stdout is not None
    for line in process.stdout:
        if "step_3" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    names = sorted(path.name for path in (killed.folder / "ckpts").iterdir())
    assert names == ["step_1", "step_2", "step_3.tmp"]

    assert killed.train(*arm, *SAVE, "checkpointing.save_period=1", run_id="run-2") == 0
    assert killed.record.segments == [1, 3]
    for name in ("train/loss", "train/grad_norm"):
        assert killed.metrics[name] == straight.metrics[name]
    names = sorted(path.name for path in (killed.folder / "ckpts").iterdir())
    assert names == ["step_2", "step_3", "step_4"]  # the three that keep_top_k keeps
