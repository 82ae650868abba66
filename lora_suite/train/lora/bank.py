# SPDX-License-Identifier: Apache-2.0
"""The adapter bank: every adapter of a model in one flat master, one flat gradient, one optimizer.

Adapters are tiny and many; what costs is the number of tensors, not their size. So all factors of a rank live
in one buffer: one reduction over data parallel ranks, one over tensor parallel ones for the replicated
factors, one norm, one AdamW. Sharding wrappers must leave them alone (`fully_shard(ignored_params=…)`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lora_suite.config.schema import Optimizer
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.spec import initialise
from lora_suite.train.optimizer import build_optimizer
from lora_suite.train.topology import Topology

FACTORS = ("a", "b")
_SECTIONS = ("replicated", "tp", "ep")


@dataclass(frozen=True)
class Slot:
    """Where a factor lies in the flat buffers: [start, stop)."""

    adapter: Adapter
    factor: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Name of the factor, unique in the model."""
        return f"{self.adapter.name}.{self.factor}"


class AdapterBank:
    """Owns the factors of all adapters of this rank, their gradients and their optimizer.

    Flat buffers: `compute` (what the model multiplies with; the factors are views of it), `gradient` (same
    dtype; the factors' ``.grad`` are views, into which autograd accumulates), `master` (float32 or float64,
    what the optimizer updates). Replicated factors come first (up to `replicated`), then those that tensor
    parallel ranks split, then those of routed experts that expert parallel ranks split (from `experts` on),
    so that each kind is one slice. `listeners` are called whenever the factors have changed.
    """

    def __init__(self, adapters: Sequence[Adapter], topology: Topology, model_dtype: torch.dtype) -> None:
        if not adapters:
            raise ValueError("no adapters: nothing would be trained")
        self.adapters = tuple(adapters)
        self.topology = topology
        self.model_dtype = model_dtype
        self.dtype = self.adapters[0].spec.dtype or model_dtype
        self.slots: tuple[Slot, ...] = ()
        self.replicated = self.experts = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._collected = False
        self.listeners: list[Callable[[], None]] = []
        self._allocate()

    # -- construction ---------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Lay out the buffers, initialise the factors, register them with their adapters."""
        order = sorted(
            ((adapter, factor) for adapter in self.adapters for factor in FACTORS),
            key=lambda item: _SECTIONS.index(self._section(*item)),
        )
        slots, start = [], 0
        for adapter, factor in order:
            size = math.prod(adapter.local_shape(factor))
            section = self._section(adapter, factor)
            if section == "replicated":
                self.replicated = start + size
            if section != "ep":
                self.experts = start + size
            slots.append(Slot(adapter, factor, start, start + size))
            start += size
        self.slots = tuple(slots)
        device = self.topology.device
        master_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.master = torch.empty(start, dtype=master_dtype, device=device)
        self.compute = torch.empty(start, dtype=self.dtype, device=device)
        self.gradient = torch.zeros(start, dtype=self.dtype, device=device)
        self.master_gradient = torch.zeros(start, dtype=master_dtype, device=device)
        for slot in self.slots:
            self._initialise(slot)
        self.compute.copy_(self.master)
        for slot in self.slots:
            self._register(slot)
        self._seed_dropout()

    def _seed_dropout(self) -> None:
        """Give the adapters one generator: equal on tensor parallel ranks, different on all others."""
        self.generator: torch.Generator | None = None
        spec, topology = self.adapters[0].spec, self.topology
        if spec.dropout == 0.0:
            return
        text = f"{spec.seed}:dropout:{topology.dp.index}:{topology.pp.index}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        self.generator = torch.Generator(topology.device).manual_seed(seed)
        for adapter in self.adapters:
            adapter.generator = self.generator

    @staticmethod
    def _section(adapter: Adapter, factor: str) -> str:
        """Over which ranks a factor is split."""
        if adapter.sharded_dim(factor) is None:
            return "replicated"
        return "tp" if adapter.shard_axis is adapter.tp else "ep"

    def _keys(self, section: str) -> list[str]:
        return [slot.key for slot in self.slots if self._section(slot.adapter, slot.factor) == section]

    def _initialise(self, slot: Slot) -> None:
        """Draw the whole factor from (seed, name) and keep this rank's part: no layout changes a value."""
        adapter, spec = slot.adapter, slot.adapter.spec
        digest = hashlib.sha256(f"{spec.seed}:{slot.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole = torch.empty(adapter.full_shape(slot.factor), dtype=torch.float32)
        initialise(whole, spec.a_init if slot.factor == "a" else spec.b_init, generator)
        self.master[slot.start : slot.stop] = adapter.local_part(slot.factor, whole).flatten()

    def _register(self, slot: Slot) -> None:
        shape = slot.adapter.local_shape(slot.factor)
        parameter = nn.Parameter(self.compute[slot.start : slot.stop].view(shape))
        parameter.grad = self.gradient[slot.start : slot.stop].view(shape)
        slot.adapter.register_parameter(slot.factor, parameter)

    def build_optimizer(self, config: Optimizer) -> None:
        """Create the optimizer over the flat master: one tensor, so one fused update."""
        self.master.grad = self.master_gradient
        kwargs = config.kwargs
        fused = self.master.is_cuda and not kwargs.foreach if kwargs.fused is None else kwargs.fused
        self._optimizer = build_optimizer([self.master], config, fused=fused)

    # -- one step -------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Between two micro batches: add the first one's gradients to the float32 sum and clear them.

        Without it micro batches add up in the dtype of the factors, which in half precision loses the small
        ones. Whoever trains a single micro batch a step need not call it.
        """
        if self.gradient.dtype == self.master_gradient.dtype:
            return
        if self._collected:
            self.master_gradient.add_(self.gradient)
        else:
            self.master_gradient.copy_(self.gradient)
        self._collected = True
        self.gradient.zero_()

    def sync_gradients(self) -> None:
        """Sum gradients over data parallel ranks, and replicated factors' over tensor parallel ones.

        An expert's factors are summed over the ranks that hold it: it has seen the rows of all others.
        The loss is already divided by the global batch's tokens, so sums (never averages) are right.
        """
        if self._collected:
            self.master_gradient.add_(self.gradient)
            self.gradient.copy_(self.master_gradient)
        else:
            self.master_gradient.copy_(self.gradient)
        self.topology.dp.sum(self.master_gradient[: self.experts])
        self.topology.same_experts.sum(self.master_gradient[self.experts :])
        self.topology.tp.sum(self.master_gradient[: self.replicated])

    def squared_norm(self) -> torch.Tensor:
        """Squared norm of this model copy's gradient (scalar), replicas counted once.

        Sums over tp and ep for the sharded factors and over pp stages; the result is equal on all ranks.
        """
        parts = (slice(self.replicated), slice(self.replicated, self.experts), slice(self.experts, None))
        # One pass, where square().sum() would write the squares and read them again.
        squares = [torch.linalg.vector_norm(self.master_gradient[part]).square() for part in parts]
        sharded, experts = self.topology.tp.sum(squares[1]), self.topology.ep.sum(squares[2])
        return self.topology.pp.sum(squares[0] + sharded + experts)

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale the gradient to `max_norm`; return the norm before. No host synchronisation."""
        norm = self.squared_norm().sqrt()
        if max_norm is not None:
            # The same guard as torch.nn.utils.clip_grad_norm_, so that both arms clip alike.
            self.master_gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, lr: float) -> None:
        """Update the master, copy it to what the model multiplies with, clear the gradients."""
        if self._optimizer is None:
            raise RuntimeError("build_optimizer() comes first")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.publish()
        self.gradient.zero_()
        self._collected = False

    def publish(self) -> None:
        """Copy the master to what the model multiplies with, and tell whoever holds copies of that."""
        self.compute.copy_(self.master)
        for listener in self.listeners:
            listener()

    # -- what invariants, checkpoints and tests look at -----------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Every factor of this rank, for wrappers that must ignore them."""
        return [getattr(slot.adapter, slot.factor) for slot in self.slots]

    def span(self, adapters: Sequence[Adapter]) -> nn.Parameter | None:
        """A and B of each of these adapters in turn as one flat parameter, a view with a gradient of views.

        None where they do not lie side by side.
        """
        wanted = {id(adapter) for adapter in adapters}
        slots = [slot for slot in self.slots if id(slot.adapter) in wanted]
        order = [(id(adapter), factor) for adapter in adapters for factor in FACTORS]
        starts = [slot.start for slot in slots[1:]]
        if [(id(slot.adapter), slot.factor) for slot in slots] != order or starts != [
            slot.stop for slot in slots[:-1]
        ]:
            return None
        whole = slice(slots[0].start, slots[-1].stop)
        parameter = nn.Parameter(self.compute[whole])
        parameter.grad = self.gradient[whole]
        return parameter

    def trainable_parameters(self) -> int:
        """Parameters of all adapters of this pipeline stage, over tp and ep ranks, replicas once."""
        return sum(self.parameters_by_adapter().values())

    def parameters_by_adapter(self) -> dict[str, int]:
        """Parameters of each adapter of this pipeline stage, over tp and ep ranks, by name."""
        return {
            adapter.name: sum(math.prod(adapter.full_shape(factor)) for factor in FACTORS)
            for adapter in self.adapters
        }

    @property
    def dtypes(self) -> dict[str, str]:
        """In which dtype the factors are kept and updated, and in which they are multiplied."""
        names = {"master_dtype": self.master.dtype, "compute_dtype": self.compute.dtype}
        return {name: str(dtype).removeprefix("torch.") for name, dtype in names.items()}

    def largest(self, buffer: torch.Tensor) -> torch.Tensor:
        """Largest absolute value of each factor's part of one of the flat buffers [slots], on the device."""
        parts = [buffer[slot.start : slot.stop] for slot in self.slots]
        return torch.stack(torch._foreach_norm(parts, float("inf")))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it no adapter adds anything."""
        for adapter in self.adapters:
            adapter.switch(False)
        try:
            yield
        finally:
            for adapter in self.adapters:
                adapter.switch(True)

    def load_factors(self, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start from given whole factors (A [rank, in], B [out, rank]) by the adapters' names.

        What other pipeline stages have is left aside; an adapter that is not there is a KeyError.
        """
        for slot in self.slots:
            whole = factors[slot.adapter.name][FACTORS.index(slot.factor)]
            self.master[slot.start : slot.stop] = slot.adapter.local_part(slot.factor, whole).flatten()
        self.publish()

    def state_dict(self) -> dict[str, Any]:
        """Master copies by factor, the optimizer's and the dropout generator's state; this rank's part.

        sharded: the factors of which tensor parallel ranks hold different parts. experts: how many experts
        this rank has, by factor of an adapter for each of them.
        """
        if self._optimizer is None:
            raise RuntimeError("build_optimizer() comes first")
        factors = {slot.key: self.master[slot.start : slot.stop].clone() for slot in self.slots}
        dropout = self.generator.get_state() if self.generator is not None else None
        return {
            "factors": factors,
            "sharded": self._keys("tp"),
            "experts": {
                slot.key: slot.adapter.local_shape(slot.factor)[0]
                for slot in self.slots
                if len(slot.adapter.full_shape(slot.factor)) > 2
            },
            "optimizer": self._optimizer.state_dict(),
            "dropout": dropout,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; factors that differ in name or size are an error naming them."""
        if self._optimizer is None:
            raise RuntimeError("build_optimizer() comes first")
        factors = state["factors"]
        expected = {slot.key: slot.stop - slot.start for slot in self.slots}
        found = {key: value.numel() for key, value in factors.items()}
        if expected != found:
            differing = sorted(
                key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
            )
            raise KeyError(f"adapter factors differ from the checkpoint's: {', '.join(differing[:8])}")
        for slot in self.slots:
            self.master[slot.start : slot.stop] = factors[slot.key]
        self.publish()
        # The moments are the checkpoint's; betas, weight decay and the like stay the recipe's.
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        if self.generator is not None:
            self.generator.set_state(state["dropout"])
