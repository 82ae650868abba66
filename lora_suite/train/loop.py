# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, and what belongs to every step, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from lora_suite.config import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.launch.traces import PHASE_RANGE
from lora_suite.plan.metric_names import INVARIANTS_TIME
from lora_suite.train.backends.base import Backend
from lora_suite.train.batch import MicroBatch, to_device
from lora_suite.train.checkpoint import Checkpoints, Meta, layout_of, lora_of, metric_of
from lora_suite.train.data.batches import GlobalBatch
from lora_suite.train.data.load import TrainingData
from lora_suite.train.data.slicing import Slicing
from lora_suite.train.environment import peak_resident_gib
from lora_suite.train.faults import SlowPhases, drag, freezing, kill_if_due, run_out_of_memory_if_due
from lora_suite.train.lora.invariants import InvariantChecks
from lora_suite.train.process import random_state, restore_random_state
from lora_suite.train.reporter import Peak, Reporter, StepReport, Work
from lora_suite.train.schedule import learning_rate, peak_learning_rate
from lora_suite.train.timer import StepTimer

_ALLOCATED, _RESERVED = "memory/peak_allocated_gib", "memory/peak_reserved_gib"


@dataclass(frozen=True)
class Scalars:
    """What one reduction of a step brings to every rank's host."""

    loss_sum: float
    grad_norm: float
    peaks: dict[str, Peak]


class Trainer:
    """Trains one recipe on one rank.

    checks: None for full SFT. reporter: on rank 0 alone. recipe_hash: for checkpoints. lora_facts: `lora/…`
    metrics that no step changes. step: the step under way or last done, for whoever must say where a training
    died.
    """

    def __init__(
        self,
        recipe: Recipe,
        backend: Backend,
        data: TrainingData,
        checkpoints: Checkpoints,
        checks: InvariantChecks | None,
        reporter: Reporter | None,
        *,
        recipe_hash: str,
        lora_facts: Mapping[str, float],
    ) -> None:
        self._recipe = recipe
        self._backend = backend
        self._topology = backend.topology
        self._data = data
        self._checkpoints = checkpoints
        self._checks = checks
        self._reporter = reporter
        self._recipe_hash = recipe_hash
        self._lora_facts = lora_facts
        self._timer = StepTimer(self._topology.device)
        self._slow = SlowPhases(recipe.debug.faults.slow_phase, self._topology)
        self._ahead: tuple[int, list[MicroBatch]] | None = None
        self.step = 0

    @property
    def last_step(self) -> int:
        """Where the training ends."""
        return last_step(self._recipe, self._data)

    def train(self, first_step: int) -> None:
        """Make the steps from `first_step` on; leaves checkpoints, metrics and invariants behind."""
        if first_step == 1:
            self._before_first_step()
        if self._topology.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if self._reporter is not None:
            self._reporter.start_clock()
        for step in range(first_step, self.last_step + 1):
            self.step = step
            self._train_step(step)
        if self._checks is not None:
            batch = self._on_device(self._data.steps[self.step - 1], self._data.slicing)
            self._checks.after_training(self.step, batch[:1])

    def repeat_last_step(self) -> None:
        """Make the last step again, with its batch, after the training: nothing of it is reported."""
        step = self.last_step
        self._timer.start()
        self._update(step, self._data.steps[step - 1], self._learning_rate(step))

    def _learning_rate(self, step: int) -> float:
        recipe = self._recipe
        return learning_rate(
            step, peak_learning_rate(recipe), recipe.policy.scheduler, recipe.sft.max_num_steps
        )

    def _before_first_step(self) -> None:
        recipe = self._recipe
        if self._checks is not None:
            batch = self._data.steps[0]
            lora = recipe.policy.lora
            b_is_zero = lora.adapter is None and getattr(lora, "lora_B_init_method", "zero") == "zero"
            batches = self._on_device(batch, self._data.slicing)
            self._checks.before_first_step(batches, batch.supervised, b_is_zero=b_is_zero)
        if recipe.sft.val_at_start:
            loss = self._validate()
            if self._reporter is not None:
                self._reporter.validation(0, loss)

    # -- one step -------------------------------------------------------------------------------------------

    def _train_step(self, step: int) -> None:
        recipe, timer, batch = self._recipe, self._timer, self._data.steps[step - 1]
        kill_if_due(recipe.debug.faults, self._topology.rank, step)
        run_out_of_memory_if_due(recipe.debug.faults, self._topology.rank, step)
        lr = self._learning_rate(step)
        if self._reporter is not None:
            self._reporter.begin()
        timer.start()
        scalars = self._update(step, batch, lr)
        own_seconds = timer.seconds
        if self._reporter is not None:
            self._reporter.end()
        loss = scalars.loss_sum / batch.supervised
        validation_loss = None
        if self._validation_due(step):
            validation_loss = self._validate()
            timer.host("validation")
        if self._checkpoints.due(step, self.last_step):
            self._save(step, loss, validation_loss)
            timer.host("checkpointing")

        self._slow.after_step(own_seconds)
        if self._checks is not None:
            self._checks.after_step(step, loss, loss_is_comparable=recipe.policy.lora.dropout == 0.0)
        if self._reporter is not None:
            report = StepReport(
                step=step,
                loss=loss,
                grad_norm=scalars.grad_norm,
                lr=lr,
                work=self._work(batch),
                batch=batch.fingerprint,
                seconds=timer.seconds,
                phases=timer.phases,
                peaks=scalars.peaks,
                lora=self._lora_metrics(),
                validation_loss=validation_loss,
            )
            self._reporter.step(report)

    def _update(self, step: int, batch: GlobalBatch, lr: float) -> Scalars:
        """The step itself, phase by phase; the host waits for the device once, at the end.

        While the device is at work the host makes the next step's micro batches. As data counts what the
        device had to wait for.
        """
        backend, timer, faults = self._backend, self._timer, self._recipe.debug.faults
        with self._phase("data"):
            batches = self._micro_batches(step, batch)
        timer.begin_device()
        with self._phase("forward_backward", on_device=True):
            loss = backend.forward_backward(batches, batch.supervised)
        with self._phase("grad_sync", on_device=True):
            backend.sync_gradients()
        with self._phase("optimizer", on_device=True):
            if self._checks is not None:
                self._checks.after_backward(step)
            grad_norm = backend.clip_gradients(self._recipe.policy.max_grad_norm)
            with freezing(faults, backend.bank):
                backend.optimizer_step(lr)
            summed = self._reduce(loss, grad_norm)
        with record_function(f"{PHASE_RANGE}data"):
            self._look_ahead(step)
            scalars = self._scalars(summed)
        timer.host("data")
        if faults.slow_step > 1.0:
            drag(faults, sum(timer.phases.values()) - timer.phases["data"], self._topology)
            timer.host("forward_backward")
        return scalars

    def _micro_batches(self, step: int, batch: GlobalBatch) -> list[MicroBatch]:
        """The step's micro batches: those that `_look_ahead` has made, if it has."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            return ahead[1]
        return self._on_device(batch, self._data.slicing)

    def _look_ahead(self, step: int) -> None:
        """Make the micro batches of the step after this one."""
        if step < self.last_step:
            self._ahead = (step + 1, self._on_device(self._data.steps[step], self._data.slicing))

    @contextmanager
    def _phase(self, name: str, on_device: bool = False) -> Iterator[None]:
        """A phase of the step, timed, and under its name in a profiler's trace.

        on_device: the host may leave it before the device has done its work.
        """
        with record_function(f"{PHASE_RANGE}{name}"):
            yield
            self._slow.wait(name, on_device)
        (self._timer.device if on_device else self._timer.host)(name)

    def _reduce(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Loss, norm and memory of all ranks as one vector on the device, by one reduction; without a wait.

        In the vector that is summed each rank fills its own places: the loss once a data parallel rank, the
        norm once, the memory figures by rank.
        """
        topology = self._topology
        figures = _memory_figures(topology.device)
        places = torch.zeros(2 + topology.world_size * len(figures), dtype=torch.float64)
        start = 2 + topology.rank * len(figures)
        places[start : start + len(figures)] = torch.tensor(figures, dtype=torch.float64)
        vector = to_device(places, topology.device)
        if topology.tp.index == 0 and topology.pp.index == 0:
            vector[0] = loss
        if topology.rank == 0:
            vector[1] = grad_norm
        if topology.world_size > 1:
            dist.all_reduce(vector)
        return vector

    def _scalars(self, vector: torch.Tensor) -> Scalars:
        """What `_reduce` made, on the host, which waits for the device."""
        loss_sum, norm, *memory = vector.tolist()
        names = _figure_names(self._topology.device)
        peaks = {}
        for offset, name in enumerate(names):
            of_ranks = memory[offset :: len(names)]
            highest = max(of_ranks)
            peaks[name] = Peak(highest, of_ranks.index(highest))
        return Scalars(loss_sum, norm, peaks)

    def _on_device(self, batch: GlobalBatch, slicing: Slicing) -> list[MicroBatch]:
        topology = self._topology
        return [each.to(topology.device) for each in slicing.micro_batches(batch, topology.dp)]

    def _work(self, batch: GlobalBatch) -> Work:
        slots = self._data.slicing.slots(batch, self._topology.dp.size)
        return Work(slots=slots, tokens=batch.tokens, supervised=batch.supervised)

    def _lora_metrics(self) -> dict[str, float]:
        if self._checks is None:
            return {}
        seconds = self._checks.take_seconds(self._timer.seconds)
        return {"lora/grad_coverage": self._checks.coverage, INVARIANTS_TIME: seconds, **self._lora_facts}

    # -- beside the step ------------------------------------------------------------------------------------

    def _validation_due(self, step: int) -> bool:
        sft = self._recipe.sft
        periodic = sft.val_period > 0 and step % sft.val_period == 0
        return periodic or (sft.val_at_end and step == self.last_step)

    def _validate(self) -> float:
        """Mean loss over the supervised tokens of all validation batches."""
        total = torch.zeros((), dtype=torch.float64, device=self._topology.device)
        for batch in self._data.validation:
            total += self._backend.evaluate(self._on_device(batch, self._data.validation_slicing))
        tokens = sum(batch.supervised for batch in self._data.validation)
        return float(self._topology.dp.sum(total)) / tokens

    def _save(self, step: int, loss: float, validation_loss: float | None) -> None:
        metric = {"train/loss": loss, "validation/loss": validation_loss}.get(
            metric_of(self._recipe.checkpointing.metric_name) or ""
        )
        meta = Meta(
            step=step,
            layout=layout_of(self._recipe, self._topology),
            lora=lora_of(self._recipe),
            model=self._recipe.policy.model_name,
            recipe_hash=self._recipe_hash,
            batch=self._data.steps[step - 1].fingerprint,
            metric=metric,
        )
        state = {
            "backend": self._backend.state_dict(),
            "random": random_state(self._topology.device),
            "frozen": self._checks.frozen_before if self._checks is not None else "",
            "adapters": self._checks.adapters_fingerprint if self._checks is not None else "",
        }
        self._checkpoints.save(meta, state)


def last_step(recipe: Recipe, data: TrainingData) -> int:
    """Where a training ends: at `max_num_steps`, or where its epochs do, or where a planted fault says."""
    stop_at = recipe.debug.faults.stop_at
    return min(len(data.steps), stop_at) if stop_at is not None else len(data.steps)


def resume(
    recipe: Recipe, backend: Backend, data: TrainingData, checkpoints: Checkpoints
) -> tuple[int, dict[str, Any]]:
    """Restore the newest checkpoint into the backend; return its step (0: none) and this rank's state.

    Raises ConfigError if it is of another layout, other adapters or other data.
    """
    folder = checkpoints.newest()
    if folder is None:
        return 0, {}
    topology = backend.topology
    meta, state = checkpoints.load(folder, layout_of(recipe, topology), lora_of(recipe))
    if meta.step <= len(data.steps) and data.steps[meta.step - 1].fingerprint != meta.batch:
        raise ConfigError(
            f"{folder}: the batch of step {meta.step} is not the one that the checkpoint was trained on; "
            "rows, tokenizer, seed or batch size have changed, so the data cannot be continued"
        )
    backend.load_state_dict(state["backend"])
    restore_random_state(state["random"], topology.device)
    return meta.step, state


def _figure_names(device: torch.device) -> tuple[str, ...]:
    return (_ALLOCATED, _RESERVED) if device.type == "cuda" else (_ALLOCATED,)


def _memory_figures(device: torch.device) -> tuple[float, ...]:
    """Peaks of this rank in GiB since the last call (CPU: since the process began), by `_figure_names`."""
    if device.type != "cuda":
        return (peak_resident_gib(),)
    gib = 2**30
    figures = torch.cuda.max_memory_allocated(device) / gib, torch.cuda.max_memory_reserved(device) / gib
    torch.cuda.reset_peak_memory_stats(device)
    return figures
