# SPDX-License-Identifier: Apache-2.0
"""The whole program on one process with a tiny backend: what it leaves behind, and how it goes on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lora_suite.config import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.launch.record import FastPath
from lora_suite.train import program
from lora_suite.train.backends.base import NO_GPU
from lora_suite.train.batch import MicroBatch
from lora_suite.train.data.batches import GlobalBatch
from lora_suite.train.data.slicing import PaddedRows
from lora_suite.train.loop import Scalars, Trainer
from lora_suite.train.program import NOTHING_TO_DO
from lora_suite.train.topology import Axis
from tests.train.conftest import LORA, Run, small_recipe
from tests.train.fake_backend import FakeBackend

PER_STEP = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/global_valid_toks",
    "timing/train/total_step_time",
    "timing/train/step_time",
    "timing/train/data",
    "timing/train/forward_backward",
    "timing/train/grad_sync",
    "timing/train/optimizer",
    "timing/train/validation",
    "timing/train/checkpointing",
    "performance/slots_per_sec_per_gpu",
    "performance/tokens_per_sec_per_gpu",
    "performance/supervised_tokens_per_sec_per_gpu",
    "performance/model_tflops_per_gpu",
    "memory/peak_allocated_gib",
)
TWO = "cluster.gpus_per_node=2"
SAVE = ("checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.metric_name=null")


def losses(run: Run) -> dict[str, Any]:
    return run.metrics["train/loss"]


def test_every_step_has_every_metric(run: Run) -> None:
    assert run.train() == 0
    for name in PER_STEP:
        assert list(run.metrics[name]) == ["1", "2", "3", "4"], name
    assert not any(name.startswith("lora/") for name in run.metrics)
    record = run.record
    assert (record.run_id, record.steps_done, record.segments) == ("run-1", 4, [1])
    assert list(record.batches) == ["1", "2", "3", "4"]
    assert record.invariants == []
    assert record.environment is not None


def test_the_next_steps_rows_are_cut_while_the_device_is_at_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the step's work has been launched, before the host waits for it.
    order: list[Any] = []
    cut, launch, wait = PaddedRows.micro_batches, FakeBackend.optimizer_step, Trainer._scalars

    def cutting(slicing: PaddedRows, batch: GlobalBatch, dp: Axis) -> list[MicroBatch]:
        order.append(batch.fingerprint)
        return cut(slicing, batch, dp)

    def launching(backend: FakeBackend, lr: float) -> None:
        order.append("launched")
        launch(backend, lr)

    def waiting(trainer: Trainer, vector: torch.Tensor) -> Scalars:
        order.append("waits")
        return wait(trainer, vector)

    monkeypatch.setattr(PaddedRows, "micro_batches", cutting)
    monkeypatch.setattr(FakeBackend, "optimizer_step", launching)
    monkeypatch.setattr(Trainer, "_scalars", waiting)
    assert run.train() == 0
    one, two, three, four = run.record.batches.values()
    assert order == [
        *(one, "launched", two, "waits", "launched", three, "waits"),
        *("launched", four, "waits", "launched", "waits"),
    ]


def test_phases_sum_to_the_step(run: Run) -> None:
    run.train("sft.max_num_steps=8", "sft.val_period=2", *SAVE)
    metrics = run.metrics
    phases = ("data", "forward_backward", "grad_sync", "optimizer", "validation", "checkpointing")
    for step in metrics["train/loss"]:
        total = metrics["timing/train/total_step_time"][step]
        parts = {phase: metrics[f"timing/train/{phase}"][step] for phase in phases}
        assert sum(parts.values()) == pytest.approx(total, rel=0.02)
        assert metrics["timing/train/step_time"][step] == pytest.approx(
            total - parts["validation"] - parts["checkpointing"]
        )
        due = int(step) % 2 == 0
        assert (parts["validation"] > 0.0) is due
        assert (parts["checkpointing"] > 0.0) is due


def test_lora_invariants_hold(run: Run) -> None:
    run.train(LORA)
    verdicts = {each.name: each.ok for each in run.record.invariants}
    # The formula is that of the recipe's model, and this backend has another one.
    assert verdicts.pop("trainable_params") is False
    assert verdicts == dict.fromkeys(set(REQUIRED_INVARIANTS) - {"trainable_params"}, True)
    assert run.metrics["lora/trainable_params"]["1"] == 2 * 8 * 24
    assert run.metrics["lora/adapters"]["4"] == 1
    assert run.metrics["lora/grad_coverage"]["1"] == 1.0


@pytest.mark.parametrize("arm", [(), (LORA,), (LORA, "policy.dtensor_cfg.lora_cfg.dropout=0.3")])
def test_resume_equals_a_straight_run_bit_for_bit(
    new_run: Callable[[str], Run], arm: tuple[str, ...]
) -> None:
    straight, halved = new_run("straight"), new_run("halved")
    straight.train(*arm, "policy.precision=float32")
    halved.train(*arm, *SAVE, "policy.precision=float32", "debug.faults.stop_at=2")
    halved.train(*arm, *SAVE, "policy.precision=float32", "checkpointing.resume=true", run_id="run-2")
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert halved.metrics[name] == straight.metrics[name]
    assert halved.record.batches == straight.record.batches
    assert halved.record.segments == [1, 3]
    assert halved.record.run_id == "run-2"
    assert halved.record.steps_done == 4
    assert losses(straight)["1"] != losses(straight)["3"]


def test_steps_after_the_checkpoint_are_made_anew(new_run: Callable[[str], Run]) -> None:
    run = new_run("cut")
    run.train(*SAVE, "debug.faults.stop_at=3", "checkpointing.save_period=2")
    assert sorted(path.name for path in (run.folder / "ckpts").iterdir()) == ["step_2", "step_3"]
    for path in (run.folder / "ckpts" / "step_3").iterdir():
        path.unlink()
    run.train(*SAVE, "checkpointing.resume=true")
    assert run.record.segments == [1, 3]
    assert list(losses(run)) == ["1", "2", "3", "4"]


def test_a_finished_training_has_nothing_to_do(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(*SAVE)
    before = run.metrics
    assert run.train(*SAVE, "checkpointing.resume=true") == NOTHING_TO_DO
    assert "nothing to do" in capsys.readouterr().out
    assert run.metrics == before


def test_another_layout_or_other_adapters_are_refused(run: Run) -> None:
    run.train(LORA, *SAVE)
    resume = ("checkpointing.resume=true", "sft.max_num_steps=6")
    with pytest.raises(ConfigError, match=r"LoRA block.*dim is 8 there and 4 here"):
        run.train(LORA, "policy.dtensor_cfg.lora_cfg.dim=4", *SAVE, *resume)


def test_other_data_are_refused(run: Run) -> None:
    run.train(*SAVE)
    with pytest.raises(ConfigError, match="the batch of step 4"):
        run.train(*SAVE, "checkpointing.resume=true", "sft.max_num_steps=6", "sft.seed=5")


def test_a_fresh_run_does_not_mix_with_old_checkpoints(run: Run) -> None:
    run.train(*SAVE)
    with pytest.raises(ConfigError, match=r"checkpointing\.resume=true"):
        run.train(*SAVE, "checkpointing.resume=false")


def test_a_loss_that_is_not_finite_is_null_and_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FakeBackend.forward_backward
    calls = []

    def nan_in_the_second(backend: FakeBackend, batches: list[MicroBatch], tokens: int) -> torch.Tensor:
        calls.append(tokens)
        return original(backend, batches, tokens) * (math.nan if len(calls) == 2 else 1.0)

    monkeypatch.setattr(FakeBackend, "forward_backward", nan_in_the_second)
    assert run.train() == 0
    assert losses(run)["2"] is None
    assert losses(run)["3"] is not None
    assert run.record.nonfinite == {"train/loss": [2]}


class OneGpu:
    """As much of the node's GPUs as the program asks for."""

    def __len__(self) -> int:
        return 1

    def memory_gib(self) -> list[float]:
        return [12.5]

    def driver(self) -> str:
        return "580.1"

    def health(self) -> list[dict[str, int]]:
        return [{"sm_clock_mhz": 1980, "temperature_c": 41, "throttle_reasons": 4}]

    def processes(self) -> list[list[int]]:
        return [[os.getpid(), 1]]


def test_gpu_memory_is_sampled_under_the_public_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "Gpus", OneGpu)
    run.train("logger.monitor_gpus=true", "logger.gpu_monitoring.collection_interval=0.01")
    assert run.metrics["ray/node.0.gpu.0.mem_gb"]["0"] == 12.5
    for look in ("before", "after"):
        assert run.record.health[look]["gpus"] == OneGpu().health()
    (during,) = run.record.health["during"]
    # Once at the start, once at the end.
    assert during["samples"] >= 2
    assert during["throttled"] == {"4": during["samples"]}
    assert (during["others"], during["other_pids"]) == (1, [1])


def test_what_crosses_links_is_counted_over_the_steps_own_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = 0
    train, evaluate = FakeBackend.optimizer_step, FakeBackend.evaluate

    def moves(inner: Callable[..., Any], gib: int) -> Callable[..., Any]:
        def moving(*arguments: Any) -> Any:
            nonlocal counter
            counter += gib
            return inner(*arguments)

        return moving

    monkeypatch.setattr(FakeBackend, "optimizer_step", moves(train, 3))
    monkeypatch.setattr(FakeBackend, "evaluate", moves(evaluate, 5))
    monkeypatch.setattr(program, "_received", lambda recipe, gpus: lambda: float(counter))
    run.train("sft.val_period=1")
    assert run.metrics["validation/loss"]
    assert list(run.metrics["traffic/received_gib"].values()) == [3.0] * 4


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [(("logger.monitor_gpus=true",), False), (("logger.monitor_gpus=true", TWO), True), ((TWO,), False)],
)
def test_the_driver_is_asked_where_there_are_others_to_receive_from(
    overrides: tuple[str, ...], asked: bool
) -> None:
    class Counting:
        def received_gib(self, index: int) -> float:
            assert index == 0
            return 7.0

    assert program._received(small_recipe(*overrides), Counting())() == (7.0 if asked else None)  # type: ignore[arg-type]


def test_too_few_epochs_are_a_warning(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train("sft.max_num_steps=3", "sft.max_num_epochs=1", "policy.train_global_batch_size=300")
    assert "sft.max_num_epochs=1 gives 2 steps" in capsys.readouterr().err
    assert list(losses(run)) == ["1", "2"]


def test_a_crash_keeps_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: FakeBackend, lr: float) -> None:
        raise RuntimeError("broken")

    run.train("sft.max_num_steps=1")
    original = FakeBackend.optimizer_step
    steps = iter([original, original, fail])
    monkeypatch.setattr(FakeBackend, "optimizer_step", lambda *arguments: next(steps)(*arguments))
    with pytest.raises(RuntimeError, match="broken"):
        run.train()
    assert list(losses(run)) == ["1", "2"]
    assert run.record.steps_done == 2


@pytest.mark.parametrize(
    ("required", "reason", "said"),
    [
        ("false", NO_GPU, ""),
        ("true", NO_GPU, "warning: the fast path is not taken: there is no GPU\n"),
        ("false", "data.x is off", "warning: the fast path is not taken: data.x is off\n"),
        ("true", None, ""),
    ],
)
def test_why_the_fast_path_is_not_taken_is_recorded_and_said_once(
    run: Run, capsys: pytest.CaptureFixture[str], required: str, reason: str | None, said: str
) -> None:
    def build(recipe: Recipe, *_: object) -> FakeBackend:
        backend = FakeBackend(recipe)
        backend.slow_path_reason = reason
        return backend

    run.train(f"policy.require_fast_path={required}", backend=build)
    assert run.record.fast_path == FastPath(
        taken=reason is None, reason=reason or "", required=required == "true"
    )
    assert "".join(each for each in capsys.readouterr().err.splitlines(True) if "fast path" in each) == said


def test_a_fast_path_that_is_left_while_training_is_recorded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FakeBackend.optimizer_step

    def leave(backend: FakeBackend, lr: float) -> None:
        backend.slow_path_reason = "a shape cannot be captured"
        original(backend, lr)

    monkeypatch.setattr(FakeBackend, "optimizer_step", leave)
    run.train()
    assert run.record.fast_path is not None
    assert run.record.fast_path.reason == "a shape cannot be captured"


@pytest.mark.parametrize("arm", [(), (LORA, "policy.dtensor_cfg.lora_cfg.dim=8")])
def test_a_gpu_with_known_peaks_gives_every_step_a_floor(
    run: Run, monkeypatch: pytest.MonkeyPatch, arm: tuple[str, ...]
) -> None:
    monkeypatch.setattr(program, "device_name", lambda device: "NVIDIA H200")
    run.train(*arm, "policy.precision=bfloat16", "data.pad_to_max_length=true")
    metrics, record = run.metrics, run.record
    assert record.floor is not None
    # The tiny Llama: 94,208 matrix elements in 115,008 parameters, four rows of 64 slots.
    operations = (4 if arm else 6) * 94_208 + 6 * 2 * 64 * 64 + (6 * 16_384 if arm else 0)
    assert record.floor.arithmetic == pytest.approx(4 * 64 * operations / 989.4e12)
    assert record.floor.update == pytest.approx(26 * (16_384 if arm else 115_008) / 4.8e12)
    for step, floor in metrics["performance/floor_seconds"].items():
        assert floor == pytest.approx(record.floor.update + max(record.floor.arithmetic, record.floor.memory))
        assert metrics["performance/floor_ratio"][step] == pytest.approx(
            metrics["timing/train/step_time"][step] / floor
        )


def test_how_weights_are_held_and_what_is_expected_is_recorded(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train("policy.precision=float32")
    memory = run.record.memory
    assert memory is not None
    assert (memory.sharding, memory.replicas, memory.shards, memory.device_gib) == ("replicate", 1, 1, None)
    assert memory.expected_gib["weights"] == pytest.approx(4 * 115_008 / 2**30)
    assert "memory: weights held whole (replicate); the memory model expects " in capsys.readouterr().out


def test_a_training_that_is_too_large_is_warned_of(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "device_memory", lambda device: 2**20)
    run.train()
    assert "warning: that is more than the GPU has room for" in capsys.readouterr().err
