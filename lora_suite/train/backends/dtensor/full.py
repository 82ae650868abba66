# SPDX-License-Identifier: Apache-2.0
"""Full SFT: every parameter but routers trained, by an optimizer that works on this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lora_suite.config.schema import Optimizer
from lora_suite.train.backends.dtensor.parallel import has_partial_gradient, is_tp_shard
from lora_suite.train.optimizer import build_optimizer
from lora_suite.train.topology import Axis, Topology


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory, outside autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Places:
    """Over which ranks parameters are spread.

    shards: the axis over which FSDP2 has sharded them (it sums their gradients over all of dp); of one rank
    where it has not. experts: names of those that the topology's expert parallel ranks hold different parts
    of; expert_shards: the axis over which FSDP2 has sharded such a part.
    """

    topology: Topology
    shards: Axis
    expert_shards: Axis
    experts: frozenset[str]


class FullParameters:
    """Gradients, norm and optimizer of all parameters, with the methods of an `AdapterBank`.

    Clipping and Adam are elementwise but for the norm, so they run on plain local tensors: the sums over
    ranks are written out here and nothing goes through DTensor's dispatch.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], places: Places, config: Optimizer) -> None:
        self._named = dict(named)
        self._topology = places.topology
        self._places = places
        self._locals = {name: local_part(parameter) for name, parameter in self._named.items()}
        self._sharded = [name for name, parameter in self._named.items() if is_tp_shard(parameter)]
        apart = {*self._sharded, *places.experts}
        self._replicated = [name for name in self._named if name not in apart]
        self._partial = [name for name in self._replicated if has_partial_gradient(name)]
        self._optimizer = build_optimizer(list(self._locals.values()), config, fused=config.kwargs.fused)

    def sync_gradients(self) -> None:
        """Hand the gradients, which FSDP2 has summed over dp, to the optimizer; sum partial ones over tp."""
        for name, parameter in self._named.items():
            self._locals[name].grad = None if parameter.grad is None else local_part(parameter.grad)
        if self._partial and self._topology.tp.size > 1:
            gradients = self._gradients(self._partial)
            flat = self._topology.tp.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            sizes = [gradient.numel() for gradient in gradients]
            torch._foreach_copy_(
                gradients, [p.view_as(g) for p, g in zip(torch.split(flat, sizes), gradients, strict=True)]
            )

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to `max_norm`; return the norm before, with shards summed and replicas once."""
        norm = self._squared_norm().sqrt()
        if max_norm is not None:
            gradients = self._gradients(self._named)
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _squared_norm(self) -> torch.Tensor:
        total = self._topology.tp.sum(self._squares(self._sharded)) + self._squares(self._replicated)
        total = self._places.shards.sum(total)
        if not self._places.experts:
            return total
        experts = self._places.expert_shards.sum(self._squares(sorted(self._places.experts)))
        return total + self._topology.ep.sum(experts)

    def _squares(self, names: Sequence[str]) -> torch.Tensor:
        gradients = self._gradients(names)
        if not gradients:
            return torch.zeros((), device=self._topology.device)
        return torch.stack(torch._foreach_norm(gradients)).square().sum()

    def _gradients(self, names: Iterable[str]) -> list[torch.Tensor]:
        return [gradient for name in names if (gradient := self._locals[name].grad) is not None]

    def step(self, lr: float) -> None:
        """Update the parameters and clear the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for name, parameter in self._named.items():
            self._locals[name].grad = parameter.grad = None

    def trainable_parameters(self) -> int:
        """Trainable parameters of the whole model."""
        return sum(
            parameter.numel() * (self._topology.ep.size if name in self._places.experts else 1)
            for name, parameter in self._named.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards by name, and the optimizer's state."""
        return {"parameters": self._locals, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; parameters that differ in name or size are a KeyError naming them."""
        saved = state["parameters"]
        shapes = [{name: tuple(t.shape) for name, t in part.items()} for part in (self._locals, saved)]
        if shapes[0] != shapes[1]:
            differing = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
            raise KeyError(f"parameters differ from the checkpoint's: {', '.join(differing[:8])}")
        for name, local in self._locals.items():
            local.copy_(saved[name])
        self._optimizer.load_state_dict(state["optimizer"])
