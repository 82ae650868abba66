# SPDX-License-Identifier: Apache-2.0
"""What must hold in every LoRA training, whatever its loss does: measured here, judged by the suite.

A dead adapter, a frozen weight that moves, or ranks that drift apart can all hide behind a falling loss.
Everything here runs outside the timed phases, except the launch of one multi-tensor norm in steps 1 and 2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from lora_suite.launch.record import Invariant
from lora_suite.train.backends.base import Backend
from lora_suite.train.batch import MicroBatch
from lora_suite.train.collect import gather
from lora_suite.train.lora.bank import AdapterBank

# Two forward passes over the same numbers; only the order of sums in a fused kernel may differ.
_LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_LOSS_TOLERANCE_HALF = 5e-3
_NAMED = 5


class InvariantChecks:
    """Watches one LoRA training. Every rank makes every call, in the same order.

    expected: trainable parameters by the formula, or None where the model's shape is not known. first_step:
    1, or where a resumed training goes on. frozen_before: fingerprint of this rank's frozen weights when the
    training first started (None: take it now).
    """

    def __init__(
        self,
        backend: Backend,
        bank: AdapterBank,
        expected: int | None,
        first_step: int,
        frozen_before: str | None,
    ) -> None:
        self._backend = backend
        self._bank = bank
        self._topology = backend.topology
        self._first_step = first_step
        self._master_before = bank.master.clone()
        self.frozen_before = frozen_before if frozen_before is not None else backend.frozen_fingerprint()
        # The factor beside one that starts at zero gets its first gradient one step later.
        a_is_zero = bank.adapters[0].spec.a_init == "zero"
        self._due = {1: "a", 2: "b"} if a_is_zero else {1: "b", 2: "a"}
        self._largest: torch.Tensor | None = None
        self._received: set[str] = set()
        self._base_loss: float | None = None
        self._results: dict[str, Invariant] = {}
        every_name = gather(self._topology, [adapter.name for adapter in bank.adapters])
        self.names = sorted({name for names in every_name for name in names})
        self.coverage = 0.0
        self.trainable = backend.trainable_parameters()
        self._check_count(expected)

    @property
    def results(self) -> list[Invariant]:
        """Everything measured so far; equal on all ranks."""
        return list(self._results.values())

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
            self._largest = self._bank.largest(self._bank.gradient)

    def after_step(self, step: int, loss: float, loss_is_comparable: bool) -> None:
        """Evaluate what `after_backward` noted, and the loss of step 1.

        loss_is_comparable: the training loss has no dropout in it.
        """
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

    def after_training(self, steps_done: int) -> None:
        """Look at the end state: what moved, what must not have, and whether replicas agree."""
        if steps_done < self._first_step:
            return
        self._check_moved(steps_done)
        self._check_frozen()
        self._check_replicas()

    # -- the single checks ----------------------------------------------------------------------------------

    def _check_count(self, expected: int | None) -> None:
        counted = self.trainable
        if expected is None:
            self._record("trainable_params", None, f"{counted}; the model's shape is not known beforehand")
        else:
            self._record("trainable_params", counted == expected, f"{counted}, by the formula {expected}")

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
        message = f"changed on {_some(changed)}" if changed else "every bit as at the start"
        self._record("frozen_unchanged", not changed, message)

    def _check_replicas(self) -> None:
        topology, bank = self._topology, self._bank
        mine = (
            topology.pp.index,
            topology.tp.index,
            _digest(bank.master),
            _digest(bank.master[: bank.replicated]),
        )
        over_dp: dict[tuple[int, int], set[str]] = {}
        over_tp: dict[int, set[str]] = {}
        for pp, tp, whole, replicated in gather(topology, mine):
            over_dp.setdefault((pp, tp), set()).add(whole)
            over_tp.setdefault(pp, set()).add(replicated)
        differing = [
            *(
                f"data parallel ranks of tp {tp}, pp {pp}"
                for (pp, tp), all_ in over_dp.items()
                if len(all_) > 1
            ),
            *(f"tensor parallel ranks of pp {pp}" for pp, all_ in over_tp.items() if len(all_) > 1),
        ]
        message = (
            f"differ: {_some(differing)}" if differing else "equal, bit by bit, on all ranks that hold one"
        )
        self._record("replicas_equal", not differing, message)

    # -- recording ------------------------------------------------------------------------------------------

    def _record_missing(self, name: str, missing: list[str], message: str) -> None:
        """Record a check that lists what fails it on this rank; it fails if it does on any rank."""
        anywhere = sorted({key for keys in gather(self._topology, missing) for key in keys})
        self._record(name, not anywhere, f"not so: {_some(anywhere)}" if anywhere else message)

    def _record(self, name: str, ok: bool | None, message: str) -> None:
        self._results[name] = Invariant(name=name, ok=ok, message=message)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
