# SPDX-License-Identifier: Apache-2.0
"""Questions to a trained model that need adapters which do something: what they add, and what dropout drops.

After a short training B is so close to zero that rounding hides what the adapters do. So they are asked with
a B drawn at random, and get their own back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lora_suite.train.backends.base import Backend
from lora_suite.train.batch import MicroBatch
from lora_suite.train.lora.adapter import Adapter
from lora_suite.train.lora.bank import AdapterBank
from lora_suite.train.process import random_state, restore_random_state

B_STD = 0.02
"""Spread of the drawn B: with the usual ranks and scales an adapter then adds about as much as its linear."""
_SEED = 20_260_301


@contextmanager
def drawn_b(bank: AdapterBank) -> Iterator[None]:
    """Within it every B is random, equal on ranks that hold replicas; afterwards it is as before."""
    before = bank.master.clone()
    generator = torch.Generator(bank.master.device).manual_seed(_SEED)
    for slot in bank.slots:
        if slot.factor == "b":
            bank.master[slot.start : slot.stop].normal_(0.0, B_STD, generator=generator)
    bank.publish()
    try:
        yield
    finally:
        bank.master.copy_(before)
        bank.publish()


def dropout_effect(backend: Backend, bank: AdapterBank, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """How much the loss of a training pass changes with equal masks, and with others: a repeat's noise and
    what dropout does. Leaves gradients behind."""
    device = backend.topology.device
    # Adapters draw from the bank's generator; the PEFT library's layers from torch's own.
    ours = bank.generator.get_state() if bank.generator is not None else None
    others = random_state(device)
    losses = []
    for repeated in (False, True, False):
        if repeated:
            restore_random_state(others, device)
            if bank.generator is not None and ours is not None:
                bank.generator.set_state(ours)
        loss = backend.forward_backward(batches, 1).detach().double().clone()
        losses.append(float(backend.topology.dp.sum(loss)))
    return abs(losses[1] - losses[0]), abs(losses[2] - losses[0])


def scale_found(backend: Backend, bank: AdapterBank, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """What the model's linears add with their adapters, as a multiple of (alpha / rank)·x·Aᵀ·Bᵀ, by adapter.

    Each adapted linear is asked when the model calls it: for its output with the adapter and without, this
    rank's part of it, before any reduction. The multiple is the least-squares factor c of D ≈ c·E, which
    the rounding of single elements hardly moves. Linears that a layer computes together with others in one
    kernel are not called by themselves, and not asked.
    """
    found: dict[str, float] = {}
    owners = _owners(backend.model, bank)

    def ask(module: nn.Module, arguments: tuple[torch.Tensor, ...], _: object) -> None:
        asked = {place: each for place, each in owners[module].items() if each.name not in found}
        if not asked:
            return
        added = _addition(module, owners[module], arguments)
        for place, adapter in asked.items():
            expected = _formula(adapter, *arguments)
            squared = float(expected.square().sum())
            if squared > 0.0:
                part = _part(module, added, place).to(expected.dtype)
                found[adapter.name] = float((part * expected).sum()) / squared

    hooks = [module.register_forward_hook(ask) for module in owners]
    try:
        backend.evaluate(batches)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _owners(model: nn.Module, bank: AdapterBank) -> dict[nn.Module, dict[int, Adapter]]:
    """Modules that compute linears with adapters, with the adapters by the linear's position in the module.

    Either a module of several linears that share an input, or the linear under the adapter's own name. A
    stack of routed experts is multiplied by its adapter's module.
    """
    owners: dict[nn.Module, dict[int, Adapter]] = {}
    for module in model.modules():
        several: dict[int, Adapter] = getattr(module, "by_position", {})
        if several:
            owners[module] = several
    grouped = {id(adapter) for several in owners.values() for adapter in several.values()}
    modules = dict(model.named_modules())
    for adapter in bank.adapters:
        linear = adapter if adapter.multiplies else modules.get(adapter.name)
        if id(adapter) not in grouped and linear is not None:
            owners[linear] = {0: adapter}
    return {module: several for module, several in owners.items() if _separable(module, several)}


def _separable(module: nn.Module, adapters: Mapping[int, Adapter]) -> bool:
    """Whether this rank's part of what the adapters add can be had from the module's output."""
    if any(
        each.sharded_dim("a") is not None and each.sharded_dim("b") is not None and not each.multiplies
        for each in adapters.values()
    ):
        return False  # its output is exchanged with other ranks
    # A row-parallel linear's bias joins the reduced sum.
    return not (
        getattr(module, "bias", None) is not None
        and adapters.get(0) is not None
        and adapters[0].placement == "row"
    )


def _formula(adapter: Adapter, x: torch.Tensor, *expert_arguments: torch.Tensor) -> torch.Tensor:
    """What an adapter adds for x by its definition, written out anew and in at least float32.

    expert_arguments: of a stack of experts its weight, and where each expert's rows end.
    """
    x = _local(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = adapter.a.detach().to(wide), adapter.b.detach().to(wide)
    if a.dim() == 3:
        sizes = torch.diff(expert_arguments[1], prepend=expert_arguments[1].new_zeros(1)).tolist()
        parts = zip(torch.split(x.to(wide), sizes), a, b, strict=True)
        update = torch.cat([rows @ each_a.t() @ each_b.t() for rows, each_a, each_b in parts])
    else:
        update = x.to(wide) @ a.t() @ b.t()
    return update * (adapter.spec.alpha / adapter.spec.rank)


def _addition(
    module: nn.Module, adapters: Mapping[int, Adapter], arguments: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What a module adds for its adapters: this rank's part of its output with them, less that without."""
    if hasattr(module, "add"):
        # It holds adapters alone: its output is what its linear adds.
        return _local(module.forward(*arguments))
    with_adapters = _local(module.forward(*arguments))
    for adapter in adapters.values():
        adapter.switch(False)
    without = _local(module.forward(*arguments))
    for adapter in adapters.values():
        adapter.switch(True)
    return with_adapters - without


def _part(module: nn.Module, added: torch.Tensor, position: int) -> torch.Tensor:
    """One linear's part of what was added for several: their channels follow each other, group by group."""
    widths: Sequence[int] = getattr(module, "widths", ())
    if len(widths) < 2:
        return added
    groups: int = getattr(module, "groups", 1)
    grouped = added.reshape(*added.shape[:-1], groups, -1)
    return torch.split(grouped, [width // groups for width in widths], -1)[position].flatten(-2)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
