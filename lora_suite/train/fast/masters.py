# SPDX-License-Identifier: Apache-2.0
"""Full SFT without sharding: float32 masters of every weight, updated in one pass over memory.

What bounds the update is traffic: per parameter it reads gradient, master and two moments, and writes the
latter three and the weight, 28 bytes for a bfloat16 model. A compiled elementwise function does it in one
pass, where a library's optimizer would need the gradient in float32 first and a copy to bfloat16 after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lora_suite.config.schema import Optimizer

_TOGETHER = 64
"""Tensors that one compiled update takes; a kernel's arguments are limited."""

Update = Callable[..., None]


def adam_update(
    masters: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
) -> None:
    """One step of Adam or AdamW (Loshchilov and Hutter, arXiv 1711.05101) in torch's form, in place.

    scalars: factor on the gradients, learning rate, and the bias corrections 1 - beta^step of both moments.
    decoupled: AdamW's decay of the weights; otherwise it is added to the gradient.
    """
    factor, lr, first_correction, second_correction = scalars
    for master, first, second, gradient, weight in zip(
        masters, firsts, seconds, gradients, weights, strict=True
    ):
        g = gradient.to(master.dtype) * factor
        if decoupled:
            master.mul_(1.0 - lr * decay)
        else:
            g = g + master * decay
        first.lerp_(g, 1.0 - betas[0])
        second.mul_(betas[1]).addcmul_(g, g, value=1.0 - betas[1])
        denominator = (second / second_correction).sqrt() + eps
        master.sub_(lr * (first / first_correction) / denominator)
        if weight is not master:
            weight.copy_(master)


class MasterWeights:
    """Trains every parameter of an unsharded model on one rank, with the methods of an `AdapterBank`.

    compiled: whether the update is compiled.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: Optimizer, compiled: bool) -> None:
        self._parameters = list(parameters)
        self._weights = [parameter.detach() for parameter in self._parameters]
        self._masters = [
            weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
            for weight in self._weights
        ]
        self._firsts = [torch.zeros_like(master) for master in self._masters]
        self._seconds = [torch.zeros_like(master) for master in self._masters]
        self._sums: list[torch.Tensor] | None = None
        self._config = config
        self._steps = 0
        device, dtype = self._weights[0].device, self._masters[0].dtype
        self._scalars = torch.ones(4, dtype=dtype, device=device)
        self._update: Update = torch.compile(adam_update, dynamic=False) if compiled else adam_update

    def reload(self) -> None:
        """Take the masters from the weights, after these were loaded."""
        for master, weight in zip(self._masters, self._weights, strict=True):
            if master is not weight:
                master.copy_(weight)

    def begin(self) -> None:
        """Forget the sums of the last step."""
        self._sums = None

    def add(self) -> None:
        """Add the gradients of one micro batch of several, in the masters' precision."""
        gradients = self._own_gradients()
        if self._sums is None:
            self._sums = [gradient.to(self._masters[0].dtype, copy=True) for gradient in gradients]
        else:
            torch._foreach_add_(self._sums, gradients)

    def _own_gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return self._sums if self._sums is not None else self._own_gradients()

    def sync_gradients(self) -> None:
        """One rank has nothing to reduce."""

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Note the factor that brings the gradients to `max_norm`; return the norm before."""
        norms = torch._foreach_norm(self._gradients(), dtype=self._scalars.dtype)
        norm: torch.Tensor = torch.stack(norms).square().sum().sqrt()
        if max_norm is not None:
            # The same guard as torch.nn.utils.clip_grad_norm_, so that all arms clip alike.
            self._scalars[0] = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update masters and weights."""
        self._steps += 1
        kwargs = self._config.kwargs
        corrections = [1.0 - beta**self._steps for beta in kwargs.betas]
        self._scalars[1:].copy_(torch.tensor([lr, *corrections], dtype=self._scalars.dtype))
        scalars = self._scalars.unbind()
        lists = (self._masters, self._firsts, self._seconds, self._gradients(), self._weights)
        for start in range(0, len(self._masters), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            self._update(
                *(each[part] for each in lists),
                scalars,
                tuple(kwargs.betas),
                kwargs.eps,
                kwargs.weight_decay,
                self._config.name.endswith("AdamW"),
            )

    def trainable_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(weight.numel() for weight in self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments in the order of the parameters, and the number of steps."""
        moments = {"first": self._firsts, "second": self._seconds}
        return {"masters": self._masters, "moments": moments, "steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; tensors that differ in number or size are a KeyError."""
        ours = (self._masters, self._firsts, self._seconds)
        theirs = (state["masters"], state["moments"]["first"], state["moments"]["second"])
        if [t.shape for t in self._masters] != [t.shape for t in theirs[0]]:
            raise KeyError("the checkpoint's tensors are of another model or of another path through it")
        for mine, saved in zip(ours, theirs, strict=True):
            torch._foreach_copy_(mine, saved)
        torch._foreach_copy_(self._weights, self._masters)
        self._steps = state["steps"]
