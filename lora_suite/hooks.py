# SPDX-License-Identifier: Apache-2.0
"""LoRA invariants for any PyTorch trainer: four lines in its loop, one file beside its metrics.

    checks = LoRAInvariants(model)
    for step in range(1, steps + 1):
        loss(model).backward()
        checks.after_backward(step)
        optimizer.step()
    checks.finish()

Needs torch and the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lora_suite.train.lora.names import DELIBERATE, PATTERNS, place
from lora_suite.train.models.fingerprint import fingerprint

FILE_NAME = "lora_invariants.json"
SCHEMA_VERSION = 1
_NAMED = 5


@dataclass(frozen=True)
class Invariant:
    """One invariant. ok: None where it could not be measured; the message then says why."""

    name: str
    ok: bool | None
    message: str


@dataclass(frozen=True)
class _Factor:
    """A or B (`kind`, in small letters) of one adapter. sharded: ranks hold different parts of it."""

    name: str
    kind: str
    sharded: bool


@dataclass(frozen=True)
class _Seen:
    """What one rank saw of the factors that it holds (a part of), by name; it can be sent to the others."""

    held: frozenset[str]
    received: frozenset[str]
    moved: frozenset[str]
    changed: tuple[str, ...]
    differing: tuple[str, ...]


class LoRAInvariants:
    """Watches the LoRA training of a model by another trainer. Every rank makes every call.

    Make it once the adapters are attached, the weights loaded and the model wrapped (DDP, FSDP2, tensor
    parallel), call `after_backward` in each step and `finish` once; rank 0 then writes the results. The host
    waits for the device here, in steps 1 and 2 and in `finish`, in no other step.

    model: its trainable and its frozen parameters are looked at by name, on each rank its own part.
    directory: of `lora_invariants.json`; by default $LORA_SUITE_RUN_DIR, without it the current folder.
    pattern: what stands for A and for B in the names of parameters, where none of `PATTERNS` does.
    replicas: the ranks that hold copies of the same adapters, by default all. Where Megatron splits tensors
    or layers that is ``parallel_state.get_data_parallel_group()``.

    Raises ValueError where the model has no trainable adapter, or an A without its B.
    """

    def __init__(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str] | None = None,
        *,
        pattern: tuple[str, str] | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._directory = Path(directory or os.environ.get("LORA_SUITE_RUN_DIR") or ".")
        self._replicas = replicas
        patterns = (pattern,) if pattern else PATTERNS
        self._factors = _find_factors(model, patterns)
        self._count = _count_trainable(model, self._factors, patterns)
        self._frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
        self._frozen_before = self._fingerprints()
        self._start = {name: part.clone() for name, part in self._parts().items()}
        self._first = {kind: self._first_gradient(kind) for kind in ("a", "b")}
        self._received: dict[int, set[str]] = {}
        self._last_step = 0

    def after_backward(self, step: int) -> None:
        """Note which factors have a gradient. Call it after a step's last backward, before its update.

        step: counts from 1; a training that was resumed goes on counting.
        """
        self._last_step = step
        if step <= 2:
            self._received[step] = self._with_gradient()

    def finish(self) -> list[Invariant]:
        """Measure the end state, write all invariants, and return them: equal on all ranks."""
        everyone = _gather(self._seen())
        invariants = [
            self._count,
            Invariant("step1_loss_equals_base", None, "needs a forward pass without adapters"),
            self._gradients("b_gradients_step1", "b", everyone),
            self._gradients("a_gradients_step2", "a", everyone),
            self._unchanged(everyone),
            self._equal(everyone),
            self._moved(everyone),
        ]
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._write(invariants)
        return invariants

    # -- what this rank sees --------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Every factor by name; raises RuntimeError where one is gone."""
        there = dict(self._model.named_parameters())
        for factor in self._factors:
            if factor.name not in there:
                raise RuntimeError(f"{factor.name} is gone: make LoRAInvariants after the model is wrapped")
        return {factor.name: there[factor.name] for factor in self._factors}

    def _parts(self) -> dict[str, torch.Tensor]:
        """This rank's part of every factor, without those of which it holds nothing."""
        local = {name: _local(parameter) for name, parameter in self._parameters().items()}
        return {name: part for name, part in local.items() if part.numel()}

    def _fingerprints(self) -> dict[str, str]:
        """A checksum of this rank's part of every parameter that was frozen at the start."""
        parameters = dict(self._model.named_parameters())
        there = [name for name in self._frozen if name in parameters]
        return {name: fingerprint([(name, _local(parameters[name]))]) for name in there}

    def _first_gradient(self, kind: str) -> int:
        """The step in which this factor first gets a gradient: 2 where the one beside it starts at zero."""
        names = {each.name for each in self._factors if each.kind != kind}
        others = [part for name, part in self._start.items() if name in names]
        return 2 if others and not any(_nonzero(others)) else 1

    def _with_gradient(self) -> set[str]:
        """Names of the factors whose gradient is not zero on this rank; waits for the device."""
        found = {}
        for name, parameter in self._parameters().items():
            # Megatron's own data parallelism moves gradients into a buffer.
            gradient = getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad
            if gradient is not None and _local(gradient).numel():
                found[name] = _local(gradient)
        return {name for name, has in zip(found, _nonzero(found.values()), strict=True) if has}

    def _seen(self) -> _Seen:
        parts = self._parts()
        distances = [part - self._start[name] for name, part in parts.items()]
        after = self._fingerprints()
        return _Seen(
            held=frozenset(parts),
            received=frozenset(each.name for each in self._factors if self._in_time(each)),
            moved=frozenset(name for name, far in zip(parts, _nonzero(distances), strict=True) if far),
            changed=tuple(name for name in self._frozen if after.get(name) != self._frozen_before[name]),
            differing=self._differing(parts),
        )

    def _in_time(self, factor: _Factor) -> bool:
        """Whether the factor had a gradient by the step in which it first must have one."""
        steps = range(1, self._first[factor.kind] + 1)
        return any(factor.name in self._received.get(step, ()) for step in steps)

    def _differing(self, parts: dict[str, torch.Tensor]) -> tuple[str, ...]:
        """Names of whole factors that are not the same, bit by bit, on all ranks that hold copies."""
        sharded = {each.name for each in self._factors if each.sharded}
        mine = {name: _digest(part) for name, part in parts.items() if name not in sharded}
        values: dict[str, set[str]] = {}
        for digests in _gather(mine, self._replicas):
            for name, digest in digests.items():
                values.setdefault(name, set()).add(digest)
        return tuple(name for name, found in values.items() if len(found) > 1)

    # -- the single invariants ------------------------------------------------------------------------------

    def _gradients(self, name: str, kind: str, everyone: Sequence[_Seen]) -> Invariant:
        due = self._first[kind]
        for step in range(1, due + 1):
            if step not in self._received:
                return Invariant(name, None, f"after_backward was not called in step {step}")
        factors = [each for each in self._factors if each.kind == kind]
        missing = _lacking(factors, [(seen.held, seen.received) for seen in everyone])
        return _listing(name, missing, f"every {kind.upper()} had a gradient by step {due}", "no gradient:")

    def _moved(self, everyone: Sequence[_Seen]) -> Invariant:
        name = "adapters_moved"
        if not self._last_step:
            return Invariant(name, None, "after_backward was never called")
        factors = [each for each in self._factors if self._first[each.kind] <= self._last_step]
        still = _lacking(factors, [(seen.held, seen.moved) for seen in everyone])
        return _listing(name, still, "every factor differs from its start", "as at the start:")

    def _unchanged(self, everyone: Sequence[_Seen]) -> Invariant:
        name = "frozen_unchanged"
        if not self._frozen:
            return Invariant(name, None, "nothing is frozen")
        changed = sorted({each for seen in everyone for each in seen.changed})
        return _listing(name, changed, "every bit as at the start", "changed:")

    def _equal(self, everyone: Sequence[_Seen]) -> Invariant:
        name = "replicas_equal"
        if all(each.sharded for each in self._factors):
            return Invariant(name, None, "every factor is sharded: no rank holds a copy")
        differing = sorted({each for seen in everyone for each in seen.differing})
        return _listing(name, differing, "equal, bit by bit, on all ranks that hold one", "differ:")

    def _write(self, invariants: Sequence[Invariant]) -> None:
        """Replace the file in one go, so that a reader never sees half of it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        content = {"schema_version": SCHEMA_VERSION, "invariants": [asdict(each) for each in invariants]}
        temporary = self._directory / f".{FILE_NAME}.{os.getpid()}"
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._directory / FILE_NAME)


def _find_factors(model: nn.Module, patterns: Sequence[tuple[str, str]]) -> tuple[_Factor, ...]:
    """Both factors of every adapter of which one is trained; raises ValueError without any."""
    adapters: dict[str, dict[str, str]] = {}
    parameters = dict(model.named_parameters())
    for name in parameters:
        found = place(name, patterns)
        if found is not None and not name.endswith(".bias"):
            adapters.setdefault(found.adapter, {})[found.kind] = name
    trained = [
        names for names in adapters.values() if any(parameters[each].requires_grad for each in names.values())
    ]
    if not trained:
        known = ", ".join(f"{a}/{b}" for a, b in patterns)
        raise ValueError(
            f"no trainable parameter is an adapter's ({known}): attach the adapters first, "
            "or give the pattern of their names"
        )
    for names in trained:
        if len(names) < 2:
            raise ValueError(f"{next(iter(names.values()))} has no other factor beside it")
    return tuple(
        _Factor(name, kind, _is_sharded(parameters[name]))
        for names in trained
        for kind, name in sorted(names.items())
    )


def _count_trainable(
    model: nn.Module, factors: Sequence[_Factor], patterns: Sequence[tuple[str, str]]
) -> Invariant:
    """Whether nothing is trained but adapters, and what was added to them on purpose."""
    sizes = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
    factor_names = {each.name for each in factors}
    counted = sum(size for name, size in sizes.items() if name in factor_names)
    others = [name for name in sizes if name not in factor_names and place(name, patterns) is None]
    beside = [name for name in others if not any(word in name.split(".") for word in DELIBERATE)]
    added = f", and {len(others)} parameters that PEFT was asked to train" if others else ""
    message = f"{counted} in {len(factors) // 2} adapters{added}"
    return _listing("trainable_params", beside, message, "trained besides the adapters:")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a rank holds a part only: a DTensor that is not replicated, or a slice of a flat buffer."""
    placements = getattr(parameter, "placements", None)
    if placements is not None:
        return not all(each.is_replicate() for each in placements)
    # FSDP1 leaves one-dimensional views; Megatron marks what its tensor parallel ranks split.
    return parameter.dim() < 2 or bool(getattr(parameter, "tensor_model_parallel", False))


def _lacking(factors: Iterable[_Factor], seen: Sequence[tuple[frozenset[str], frozenset[str]]]) -> list[str]:
    """Factors that lack something on any rank that holds (a part of) them.

    seen: for each rank the factors that it holds, and those that do not lack it.
    """
    return [
        factor.name
        for factor in factors
        if not all(factor.name in fine for held, fine in seen if factor.name in held)
    ]


def _listing(name: str, broken: Sequence[str], fine: str, wrong: str) -> Invariant:
    """An invariant that holds if nothing is listed."""
    rest = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    return Invariant(name, not broken, f"{wrong} {', '.join(broken[:_NAMED])}{rest}" if broken else fine)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached."""
    whole = tensor.detach()
    return whole.to_local() if hasattr(whole, "to_local") else whole


def _nonzero(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Which tensors are not all zero, found with one copy to the host. NaN is not zero."""
    largest = [each.abs().amax().float() for each in tensors]
    return [value != 0.0 for value in torch.stack(largest).tolist()] if largest else []


def _digest(tensor: torch.Tensor) -> str:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(octets.cpu().numpy().tobytes()).hexdigest()


def _gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The same thing from every rank; `mine` alone where there is no other process."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
