# SPDX-License-Identifier: Apache-2.0
"""What must hold in every LoRA training, whatever its loss does: measured here, judged by the suite.

A dead adapter, a frozen weight that moves, or ranks that drift apart can all hide behind a falling loss.
Everything here runs outside the timed phases, except the launch of one multi-tensor norm in steps 1 and 2;
what it costs is measured, too.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lora_suite.launch.record import Invariant
from lora_suite.train.backends.base import Backend
from lora_suite.train.batch import MicroBatch
from lora_suite.train.collect import gather
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.lora.growth import MOST_GROWTH, Growth
from lora_suite.train.lora.names import few
from lora_suite.train.lora.probes import drawn_b, dropout_effect, scale_found
from lora_suite.train.models.fingerprint import fingerprint

# Two forward passes over the same numbers; only the order of sums in a fused kernel may differ.
_LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_LOSS_TOLERANCE_HALF = 5e-3
# By how much what an adapter adds may miss its formula: a scale that is applied twice or not at all is off by
# a factor of 2 and more; bfloat16 moves the least-squares factor by less than a percent.
_SCALE_TOLERANCE = 0.05
# Other masks must move the loss by more than this many times the noise of a repeated pass.
_ABOVE_NOISE = 10.0
# Share of the steps' time that all of this may take.
_MOST_COST = 0.01
# Steps between two looks at the adapters. The host waits 0.3 to 0.5 ms for one, 1 to 2 % of a step of 22 ms.
_LOOK_EVERY = 5
_STEPS_ASKED_MORE = 2  # what only they are asked, and what the device loads for it, is no cost of a step


class InvariantChecks:
    """Watches one LoRA training. Every rank makes every call, in the same order.

    expected: trainable parameters by the formula, planned: those of each adapter by name, and layer_coverage:
    share of the layers with an adapter, at least least_coverage; None where the model's shape is not known.
    first_step: 1, or where a resumed training goes on. frozen_before: fingerprint of this rank's frozen
    weights when the training first started (None: take it now). dropout: the recipe's. saved_adapters:
    `adapters_fingerprint` when the checkpoint was written.
    """

    def __init__(
        self,
        backend: Backend,
        bank: AdapterBank,
        expected: int | None,
        first_step: int,
        frozen_before: str | None,
        *,
        planned: Mapping[str, int] | None = None,
        layer_coverage: float | None = None,
        least_coverage: float = 0.0,
        dropout: float = 0.0,
        saved_adapters: str | None = None,
    ) -> None:
        self._backend = backend
        self._bank = bank
        self._topology = backend.topology
        self._first_step = first_step
        self._dropout = dropout
        self._master_before = bank.master.clone()
        self.frozen_before = frozen_before if frozen_before is not None else backend.frozen_fingerprint()
        # The factor beside one that starts at zero gets its first gradient one step later.
        a_is_zero = bank.adapters[0].spec.a_init == "zero"
        self._due = {1: "a", 2: "b"} if a_is_zero else {1: "b", 2: "a"}
        self._largest: torch.Tensor | None = None
        self._received: set[str] = set()
        self._base_loss: float | None = None
        self._growth = Growth(bank)
        self._seconds = self._spent = self._steps_took = self._once = 0.0
        self._steps_timed = 0
        self._results: dict[str, Invariant] = {}
        every_name = gather(self._topology, [adapter.name for adapter in bank.adapters])
        self.names = sorted({name for names in every_name for name in names})
        self.coverage = 0.0
        self.trainable = backend.trainable_parameters()
        self._check_count(expected, planned)
        self._check_layers(layer_coverage, least_coverage)
        self._check_resumed(saved_adapters)

    @property
    def results(self) -> list[Invariant]:
        """Everything measured so far; equal on all ranks."""
        return list(self._results.values())

    @property
    def adapters_fingerprint(self) -> str:
        """Hash of this rank's adapters, as they are kept and as the model multiplies with them."""
        return fingerprint([("master", self._bank.master), ("compute", self._bank.compute)])

    def take_seconds(self, step_seconds: float) -> float:
        """Seconds that this has taken since it was last asked, that is in a step of `step_seconds`."""
        seconds, self._seconds = self._seconds, 0.0
        self._steps_timed += 1
        if self._steps_timed <= _STEPS_ASKED_MORE:
            self._once += seconds
        else:
            self._spent += seconds
            self._steps_took += step_seconds
        return seconds

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def before_first_step(self, batches: Sequence[MicroBatch], tokens: int, b_is_zero: bool) -> None:
        """Compare the first batch's loss with adapters on and off; does nothing in a resumed training."""
        if self._first_step > 1:
            return
        name = "step1_loss_equals_base"
        if not b_is_zero:
            self._record(name, None, "B does not start at zero")
            return
        with_adapters = self._mean_loss(self._backend.evaluate(batches), tokens)
        with self._backend.adapters_off():
            self._base_loss = self._mean_loss(self._backend.evaluate(batches), tokens)
        self._compare_losses(name, with_adapters, "with adapters")

    def after_backward(self, step: int) -> None:
        """Note which factors have a gradient; launches work, waits for nothing."""
        if step <= 2 or step == self._first_step:
            with self._timed():
                self._largest = self._bank.largest(self._bank.gradient)

    def after_step(self, step: int, loss: float, loss_is_comparable: bool) -> None:
        """Look at norms of adapters now and then, at what `after_backward` noted, and at step 1's loss.

        loss_is_comparable: the training loss has no dropout in it.
        """
        with self._timed():
            if step < self._first_step + _STEPS_ASKED_MORE or step % _LOOK_EVERY == 0:
                self._growth.look(step)
            self._after_first_steps(step, loss, loss_is_comparable)

    def _after_first_steps(self, step: int, loss: float, loss_is_comparable: bool) -> None:
        if step == 1 and self._base_loss is not None and loss_is_comparable:
            self._compare_losses("step1_loss_equals_base", loss, "in training")
        if self._largest is None:
            return
        # NaN is a gradient too, and shows up as a loss that is not finite.
        has_gradient = [value != 0.0 for value in self._largest.tolist()]
        self._largest = None
        self._received |= {slot.key for slot, has in zip(self._bank.slots, has_gradient, strict=True) if has}
        if step in self._due:
            self._check_gradients(self._due[step], step)
        self._update_coverage()

    def after_training(self, steps_done: int, batches: Sequence[MicroBatch]) -> None:
        """Look at the end state: what moved, what must not have, whether replicas agree, what adapters do.

        batches: of this rank, to ask the model with. Leaves gradients behind, but no changed adapter.
        """
        if steps_done < self._first_step:
            return
        self._check_moved(steps_done)
        self._growth.look(steps_done)
        self._check_growth()
        self._check_frozen()
        self._check_alone()
        self._check_replicas()
        with drawn_b(self._bank):
            self._check_formula(batches)
            self._check_dropout(batches)
        self._check_cost()

    # -- the single checks ----------------------------------------------------------------------------------

    def _check_count(self, expected: int | None, planned: Mapping[str, int] | None) -> None:
        counted = self.trainable
        if expected is None:
            self._record("trainable_params", None, f"{counted}; the model's shape is not known beforehand")
            return
        message = f"{counted}, by the formula {expected}"
        made: dict[str, int] = {}
        for of_rank in gather(self._topology, self._bank.parameters_by_adapter()):
            made |= of_rank
        names = sorted(made.keys() | planned.keys()) if planned is not None else []
        other = [name for name in names if planned is not None and made.get(name) != planned.get(name)]
        if other:
            message += f"; not as planned: {few(other)}"
        self._record("trainable_params", counted == expected and not other, message)

    def _check_layers(self, coverage: float | None, least: float) -> None:
        if coverage is None:
            self._record("layer_coverage", None, "the model's shape is not known beforehand")
            return
        text = f"{coverage:.0%} of the layers have an adapter, at least {least:.0%} are asked for"
        self._record("layer_coverage", coverage >= least, text)

    def _check_resumed(self, saved: str | None) -> None:
        """Adapters of a checkpoint may be loaded and then wrapped anew, or stay beside the model."""
        if self._first_step == 1:
            self._record("adapters_resumed", True, "no checkpoint is continued")
            return
        pairs = gather(self._topology, (saved, self.adapters_fingerprint))
        if any(before is None for before, _ in pairs):
            self._record("adapters_resumed", None, "the checkpoint does not say what its adapters were")
            return
        lost = [f"rank {rank}" for rank, (before, now) in enumerate(pairs) if before != now]
        message = f"not the checkpoint's on {few(lost)}" if lost else "every bit as in the checkpoint"
        self._record("adapters_resumed", not lost, message)

    def _check_growth(self) -> None:
        """Judge what the looks saw: of each adapter the first step by which it was so."""
        for name, seen, message in (
            ("adapters_finite", self._growth.broken, "every adapter was finite at every look"),
            (
                "adapter_growth",
                self._growth.grown,
                f"no adapter grew more than {MOST_GROWTH:g} times from one look to the next",
            ),
        ):
            self._record_missing(
                name, [f"{adapter} by step {step}" for adapter, step in seen.items()], message
            )

    def _check_alone(self) -> None:
        """What else trains would cost its gradient, and move."""
        ours = {id(parameter) for parameter in self._bank.parameters()}
        named = self._backend.model.named_parameters()
        others = [name for name, each in named if each.requires_grad and id(each) not in ours]
        self._record_missing("only_adapters_train", others, "no other weight asks for a gradient")

    def _check_formula(self, batches: Sequence[MicroBatch]) -> None:
        found = scale_found(self._backend, self._bank, batches)
        wrong = [
            f"{name} adds {multiple:.3g} times what it should"
            for name, multiple in found.items()
            if not abs(multiple - 1.0) <= _SCALE_TOLERANCE
        ]
        asked = sum(gather(self._topology, len(found)))
        if not asked:
            self._record("adapter_formula", None, "no adapted linear is computed by itself")
            return
        message = f"what linears add is (alpha / rank)·x·Aᵀ·Bᵀ, asked {asked} times"
        self._record_missing("adapter_formula", wrong, message)

    def _check_dropout(self, batches: Sequence[MicroBatch]) -> None:
        if self._dropout == 0.0:
            self._record("dropout_applied", True, "the recipe has none")
            return
        noise, effect = dropout_effect(self._backend, self._bank, batches)
        self._bank.gradient.zero_()
        text = f"other masks change the loss by {effect:.3g}, the same masks by {noise:.3g}"
        self._record("dropout_applied", effect > _ABOVE_NOISE * noise, text)

    def _check_cost(self) -> None:
        """On a CPU that other programs share a pause anywhere would count, so there it is told, not held."""
        if not self._steps_timed:
            self._record("invariants_cost", None, "no step was timed")
            return
        once = f"{self._once:.2g} s in the first {_STEPS_ASKED_MORE} steps"
        if self._steps_timed <= _STEPS_ASKED_MORE:
            self._record("invariants_cost", True, f"{once}, and there is no other")
            return
        share = self._spent / self._steps_took
        on_gpu = self._topology.device.type == "cuda"
        limit = f"at most {_MOST_COST:.0%}" if on_gpu else "no limit on a CPU"
        self._record(
            "invariants_cost",
            share <= _MOST_COST or not on_gpu,
            f"{share:.2%} of the steps' time ({limit}), and {once}",
        )

    def _mean_loss(self, total: torch.Tensor, tokens: int) -> float:
        return float(self._topology.dp.sum(total.detach().double().clone())) / tokens

    def _compare_losses(self, name: str, loss: float, what: str) -> None:
        assert self._base_loss is not None
        previous = self._results.get(name)
        if previous is not None and not previous.ok:
            return
        tolerance = _LOSS_TOLERANCE.get(self._bank.model_dtype, _LOSS_TOLERANCE_HALF)
        equal = math.isclose(loss, self._base_loss, rel_tol=tolerance)
        self._record(name, equal, f"{loss:.8g} {what}, {self._base_loss:.8g} without adapters")

    def _check_gradients(self, factor: str, step: int) -> None:
        name = {"a": "a_gradients_step2", "b": "b_gradients_step1"}[factor]
        missing = [
            slot.key for slot in self._bank.slots if slot.factor == factor and slot.key not in self._received
        ]
        self._record_missing(
            name, missing, f"every {factor.upper()} had a gradient on every rank by step {step}"
        )

    def _update_coverage(self) -> None:
        mine = {adapter.name for adapter in self._bank.adapters}
        without = sorted(name for name in mine if not self._received & {f"{name}.a", f"{name}.b"})
        everywhere = {name for names in gather(self._topology, without) for name in names}
        self.coverage = 1.0 - len(everywhere) / len(self.names)

    def _check_moved(self, steps_done: int) -> None:
        moved = self._bank.largest(self._bank.master - self._master_before).tolist()
        factors = {self._due[1]} if steps_done < 2 else {"a", "b"}
        still = [
            slot.key
            for slot, distance in zip(self._bank.slots, moved, strict=True)
            if slot.factor in factors and distance == 0.0
        ]
        self._record_missing("adapters_moved", still, "every factor differs from its start")

    def _check_frozen(self) -> None:
        after = self._backend.frozen_fingerprint()
        pairs = gather(self._topology, (self.frozen_before, after))
        if not any(before for before, _ in pairs):
            self._record("frozen_unchanged", None, "nothing is frozen")
            return
        changed = [f"rank {rank}" for rank, (before, now) in enumerate(pairs) if before != now]
        message = f"changed on {few(changed)}" if changed else "every bit as at the start"
        self._record("frozen_unchanged", not changed, message)

    def _check_replicas(self) -> None:
        topology, bank = self._topology, self._bank
        mine = (
            topology.pp.index,
            topology.tp.index,
            topology.ep.index,
            _digest(bank.master[: bank.experts]),
            _digest(bank.master[bank.experts :]),
            _digest(bank.master[: bank.replicated]),
        )
        over_dp: dict[tuple[int, int], set[str]] = {}
        over_tp: dict[int, set[str]] = {}
        over_edp: dict[tuple[int, int, int], set[str]] = {}
        for pp, tp, ep, all_but_experts, experts, replicated in gather(topology, mine):
            over_dp.setdefault((pp, tp), set()).add(all_but_experts)
            over_tp.setdefault(pp, set()).add(replicated)
            over_edp.setdefault((pp, tp, ep), set()).add(experts)
        differing = [
            *(
                f"data parallel ranks of tp {tp}, pp {pp}"
                for (pp, tp), all_ in over_dp.items()
                if len(all_) > 1
            ),
            *(f"tensor parallel ranks of pp {pp}" for pp, all_ in over_tp.items() if len(all_) > 1),
            *(f"ranks of expert part {ep}" for (_, _, ep), all_ in over_edp.items() if len(all_) > 1),
        ]
        message = (
            f"differ: {few(differing)}" if differing else "equal, bit by bit, on all ranks that hold one"
        )
        self._record("replicas_equal", not differing, message)

    # -- recording ------------------------------------------------------------------------------------------

    def _record_missing(self, name: str, missing: list[str], message: str) -> None:
        """Record a check that lists what fails it on this rank; it fails if it does on any rank."""
        anywhere = sorted({key for keys in gather(self._topology, missing) for key in keys})
        self._record(name, not anywhere, f"not so: {few(anywhere)}" if anywhere else message)

    def _record(self, name: str, ok: bool | None, message: str) -> None:
        self._results[name] = Invariant(name=name, ok=ok, message=message)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()
