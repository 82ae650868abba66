# SPDX-License-Identifier: Apache-2.0
"""The training program of one rank: data, backend, loop, and the record that rank 0 leaves behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lora_suite.blueprint import Blueprint, preflight
from lora_suite.blueprint.floor import StepFloor
from lora_suite.blueprint.hardware import find_gpu
from lora_suite.blueprint.sharding import MemoryPlan, plan_memory
from lora_suite.config import ConfigError, recipe_hash
from lora_suite.config.schema import Recipe
from lora_suite.launch.record import FastPath, Memory, RunRecord
from lora_suite.train.backends.base import NO_GPU, Backend
from lora_suite.train.checkpoint import Checkpoints, lora_of
from lora_suite.train.collect import gather
from lora_suite.train.data.load import TrainingData, load_data
from lora_suite.train.environment import fingerprint, health
from lora_suite.train.job import Job
from lora_suite.train.loop import Trainer, last_step, resume
from lora_suite.train.lora.invariants import InvariantChecks
from lora_suite.train.lora.start import start_from_adapter
from lora_suite.train.metrics import MetricsWriter
from lora_suite.train.monitor import MemoryMonitor
from lora_suite.train.nvml import Gpus
from lora_suite.train.out_of_memory import explain_memory
from lora_suite.train.process import device_memory, device_name, local_device, process_group, seed_ranks
from lora_suite.train.profiling import profile_steps
from lora_suite.train.reporter import Reporter, Speed, open_sinks
from lora_suite.train.watch import GpuWatch

NOTHING_TO_DO = 4
"""Exit status of a training that was to go on where it had already ended: neither a pass nor a crash."""

Build = Callable[[Recipe, Path, Blueprint, torch.device], Backend]


def build_backend(recipe: Recipe, recipe_path: Path, blueprint: Blueprint, device: torch.device) -> Backend:
    """The recipe's backend; only that one's libraries are imported."""
    build: Build
    if recipe.policy.backend == "dtensor":
        from lora_suite.train.backends.dtensor import build
    else:
        from lora_suite.train.backends.megatron import build
    return build(recipe, recipe_path, blueprint, device)


@dataclass(frozen=True)
class Parts:
    """What a training is made of, on every rank."""

    blueprint: Blueprint
    plan: MemoryPlan
    data: TrainingData
    backend: Backend
    checkpoints: Checkpoints
    checks: InvariantChecks | None
    done: int

    @property
    def lora_facts(self) -> dict[str, float]:
        """The `lora/…` metrics that no step changes."""
        if self.checks is None:
            return {}
        return {
            "lora/adapters": float(len(self.checks.names)),
            "lora/trainable_params": float(self.checks.trainable),
            "lora/layer_coverage": self.blueprint.layer_coverage,
        }


class Program:
    """This rank's training, from the run directory to the exit status."""

    def __init__(self, run_dir: Path, build: Build = build_backend) -> None:
        self.run_dir = run_dir
        self._build = build
        self._trainer: Trainer | None = None
        # What an explanation of memory needs, as far as it is known.
        self._facts: tuple[Recipe, Blueprint, torch.device] | None = None
        self._fast = False

    def explain_memory(self) -> str:
        """What to say where memory ran out; empty where it did so before the recipe was read."""
        return explain_memory(*self._facts, self._fast) if self._facts is not None else ""

    @property
    def step(self) -> int:
        """The step under way, 0 before the first."""
        return self._trainer.step if self._trainer is not None else 0

    def run(self) -> int:
        """Train; return the exit status. Raises ConfigError for what is wrong with recipe or data."""
        job = Job.read(self.run_dir)
        device = local_device()
        with process_group(device):
            parts = self._assemble(job, device)
            end = last_step(job.recipe, parts.data)
            if parts.done >= end:
                if parts.backend.topology.rank == 0:
                    print(f"nothing to do: the checkpoint is at step {parts.done} of {end}")
                return NOTHING_TO_DO
            self._train(job, parts, end)
        return 0

    def _assemble(self, job: Job, device: torch.device) -> Parts:
        recipe = job.recipe
        blueprint = preflight(recipe, job.recipe_path)
        self._facts = recipe, blueprint, device
        vocabulary = blueprint.model.vocab if blueprint.model is not None else None
        data = load_data(recipe, job.recipe_path, vocabulary)
        backend = self._build(recipe, job.recipe_path, blueprint, device)
        topology = backend.topology
        self._fast = backend.slow_path_reason is None
        plan = plan_memory(recipe, blueprint, device_memory(device), self._fast)
        if backend.bank is not None:
            start_from_adapter(backend.bank, recipe, job.recipe_path, blueprint.adapters)
        seed_ranks(recipe.sft.seed, topology)
        folder = job.files.root / recipe.checkpointing.checkpoint_dir
        checkpoints = Checkpoints(folder, recipe.checkpointing, topology)
        done = 0
        state: dict[str, Any] = {}
        if recipe.checkpointing.enabled:
            done, state = _continue(recipe, backend, data, checkpoints)
        checks = None
        if backend.bank is not None:
            known = blueprint.model is not None
            checks = InvariantChecks(
                backend,
                backend.bank,
                expected=blueprint.trainable_params if known else None,
                first_step=done + 1,
                planned=_planned(blueprint),
                frozen_before=state.get("frozen"),
                layer_coverage=blueprint.layer_coverage if known else None,
                least_coverage=recipe.policy.lora.min_layer_coverage,
                dropout=recipe.policy.lora.dropout,
                saved_adapters=state.get("adapters"),
            )
        return Parts(blueprint, plan, data, backend, checkpoints, checks, done)

    def _train(self, job: Job, parts: Parts, end: int) -> None:
        topology = parts.backend.topology
        leads_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
        gpus = Gpus() if leads_node else None
        monitor = _start_monitor(job.recipe, gpus) if gpus is not None else None
        watch = _start_watch(job.recipe, gpus) if gpus is not None else None
        reporter = None
        if topology.rank == 0:
            assert gpus is not None
            reporter = _open_reporter(job, parts, gpus, monitor, end)
        self._trainer = Trainer(
            job.recipe,
            parts.backend,
            parts.data,
            parts.checkpoints,
            parts.checks,
            reporter,
            recipe_hash=recipe_hash(job.tree),
            lora_facts=parts.lora_facts,
        )
        try:
            self._trainer.train(parts.done + 1)
            samples = gather(topology, monitor.stop() if monitor is not None else {})
            watched = gather(topology, watch.stop() if watch is not None else [])
            if reporter is not None:
                assert gpus is not None
                for of_node in samples:
                    reporter.samples(of_node)
                reporter.record.health["during"] = [gpu for of_node in watched for gpu in of_node]
                reporter.record.health["after"] = health(gpus)
            if job.recipe.logger.profile_steps:
                # What these steps train is thrown away: checkpoints, invariants and samples are taken.
                profile_steps(
                    self._trainer.repeat_last_step, job.recipe.logger.profile_steps, topology, job.files
                )
        finally:
            if reporter is not None:
                reporter.invariants(parts.checks.results if parts.checks is not None else [])
                reporter.record.fast_path = _fast_path(job.recipe, parts.backend)
                reporter.close()


def _continue(
    recipe: Recipe, backend: Backend, data: TrainingData, checkpoints: Checkpoints
) -> tuple[int, dict[str, Any]]:
    """Restore the newest checkpoint where the recipe says so; refuse to mix with one where it does not."""
    newest = checkpoints.newest()
    if newest is None:
        return 0, {}
    if not recipe.checkpointing.resume:
        raise ConfigError(
            f"{newest}: a checkpoint of an earlier run; set checkpointing.resume=true to continue it, or "
            "train in another run directory"
        )
    return resume(recipe, backend, data, checkpoints)


def _start_watch(recipe: Recipe, gpus: Gpus) -> GpuWatch | None:
    if not recipe.logger.monitor_gpus or not len(gpus):
        return None
    watch = GpuWatch(gpus, recipe.cluster.gpus_per_node, _node())
    watch.start()
    return watch


def _node() -> int:
    """This node's number, as torchrun counts them."""
    return int(os.environ.get("GROUP_RANK", "0"))


def _start_monitor(recipe: Recipe, gpus: Gpus) -> MemoryMonitor | None:
    if not recipe.logger.monitor_gpus or not len(gpus):
        return None
    monitor = MemoryMonitor(_node(), recipe.logger.gpu_monitoring.collection_interval, gpus.memory_gib)
    monitor.start()
    return monitor


def _open_reporter(job: Job, parts: Parts, gpus: Gpus, monitor: MemoryMonitor | None, end: int) -> Reporter:
    recipe, data = job.recipe, parts.data
    if len(data.steps) < recipe.sft.max_num_steps:
        print(
            f"warning: sft.max_num_epochs={recipe.sft.max_num_epochs} gives {len(data.steps)} steps, "
            f"fewer than sft.max_num_steps={recipe.sft.max_num_steps}",
            file=sys.stderr,
        )
    record = _open_record(job, parts)
    if record.lora is not None:
        print(_adapters_line(record.lora))
        for kind, (adapters, params) in parts.blueprint.adapters_by_kind.items():
            print(f"  {kind}: {adapters} adapters, {2 * adapters} tensors, {params:,} parameters")
    _warn_of_slow_path(record.fast_path)
    print(f"memory: {parts.plan}")
    if parts.plan.too_large:
        print("warning: that is more than the GPU has room for", file=sys.stderr)
    record.environment = fingerprint(recipe, gpus)
    record.health["before"] = health(gpus)
    interval = recipe.logger.gpu_monitoring.flush_interval
    writer = MetricsWriter(open_sinks(recipe, record, job.files, keep_until=parts.done or None))
    speed, received = _speed(recipe, parts), _received(recipe, gpus)
    return Reporter(record, job.files, writer, speed, end, monitor, interval, received)


def _received(recipe: Recipe, gpus: Gpus) -> Callable[[], float | None]:
    """What the first rank's GPU has received so far, where there are others to receive from."""
    if not recipe.logger.monitor_gpus or recipe.world_size == 1:
        return lambda: None
    return partial(gpus.received_gib, 0)


def _fast_path(recipe: Recipe, backend: Backend) -> FastPath:
    """What the record says of the fast path; what a shape made of it is only known after the training."""
    reason = backend.slow_path_reason
    return FastPath(taken=reason is None, reason=reason or "", required=recipe.policy.require_fast_path)


def _memory(plan: MemoryPlan) -> Memory:
    """What the record says of memory."""
    estimate = plan.estimate
    expected = {**estimate.gib, "total": estimate.total / 2**30} if estimate is not None else {}
    return Memory(
        sharding=plan.sharding,
        replicas=plan.layout.replicas,
        shards=plan.layout.shards,
        expected_gib=expected,
        device_gib=plan.memory / 2**30 if plan.memory is not None else None,
    )


def _warn_of_slow_path(path: FastPath | None) -> None:
    """Say once why the fast path is not taken; without a GPU nobody expects it, unless it is required."""
    if path is not None and not path.taken and (path.required or path.reason != NO_GPU):
        print(f"warning: the fast path is not taken: {path.reason}", file=sys.stderr)


def _planned(blueprint: Blueprint) -> dict[str, int] | None:
    """Parameters of each adapter by the formula; None where the model's shape is not known."""
    if blueprint.model is None or blueprint.rank is None:
        return None
    return {site.name: site.params(blueprint.rank) for site in blueprint.adapters}


def _adapters_line(lora: Mapping[str, Any]) -> str:
    """What trains, for the log: the record's LoRA block in words."""
    count = len(lora["adapters"])
    return (
        f"LoRA: {count} adapters, {2 * count} tensors, {lora['trainable_params']:,} parameters; masters "
        f"{lora['master_dtype']}, multiplied in {lora['compute_dtype']}"
    )


def _open_record(job: Job, parts: Parts) -> RunRecord:
    """A new record, or that of the run which is continued, cut back to the checkpoint's step."""
    record = RunRecord(
        run_id=job.run_id,
        case=job.case,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        recipe=job.tree,
        recipe_hash=recipe_hash(job.tree),
        segments=[parts.done + 1],
        steps_done=parts.done,
        data=parts.data.counts,
        fast_path=_fast_path(job.recipe, parts.backend),
        memory=_memory(parts.plan),
    )
    lora = lora_of(job.recipe)
    if lora is not None and parts.checks is not None and parts.backend.bank is not None:
        counts = {"adapters": parts.checks.names, "trainable_params": parts.checks.trainable}
        record.lora = {**lora, **counts, **parts.backend.bank.dtypes}
    if parts.done and job.files.record.exists():
        earlier = RunRecord.read(job.files.record)
        record.segments = [*(first for first in earlier.segments if first <= parts.done), parts.done + 1]
        record.batches = {step: batch for step, batch in earlier.batches.items() if int(step) <= parts.done}
        record.nonfinite = {
            name: [step for step in steps if step <= parts.done] for name, steps in earlier.nonfinite.items()
        }
        record.invariants = earlier.invariants
        record.peak_rank = earlier.peak_rank
    return record


def _speed(recipe: Recipe, parts: Parts) -> Speed:
    blueprint = parts.blueprint
    if blueprint.model is None:
        return Speed(recipe.world_size, None, None)
    gpu = find_gpu(device_name(parts.backend.topology.device), recipe.policy.precision)
    return Speed(
        world_size=recipe.world_size,
        flops_per_slot=blueprint.flops_per_token("full" if blueprint.rank is None else "lora"),
        floor=StepFloor(recipe, blueprint, parts.plan.layout, gpu).of if gpu is not None else None,
        link=gpu.link if gpu is not None and recipe.cluster.num_nodes == 1 else None,
    )
