# SPDX-License-Identifier: Apache-2.0
"""Full SFT: float32 masters of every weight, updated in one pass over memory.

What bounds the update is traffic. A bfloat16 weight is its master's upper half, so beside it only what it
lacks is kept, 16 bits (TransformerEngine calls them the parameter's remainder). Then per parameter the update
reads gradient, weight, remainder and two moments and writes the latter four: 26 bytes, and a model's masters
take 2 bytes a parameter besides its weights, not 4. A kernel does it in one pass.

SGD without momentum has no moments: its update moves 10 bytes, and a parameter takes 6 with its gradient. The
remainders it needs as much: a bfloat16 weight alone would lose updates below half of its last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from lora_suite.config.schema import Optimizer
from lora_suite.train.topology import Axis, Topology

Update = Callable[..., None]


class Weights(Protocol):
    """The weights that a rank updates: whole ones (`WholeWeights`) or its parts (`zero.ShardedWeights`).

    tensors: these weights, written in place by the update. together: how many one compiled update takes.
    replicas: positions of those that all tensor parallel ranks hold alike. shards: the axis over which ranks
    update different parts. split, replicated: parameters of this rank, over `shards`, that other tensor
    parallel ranks have others of, and that they hold alike.
    """

    tensors: list[torch.Tensor]
    replicas: tuple[int, ...]
    together: int
    shards: Axis
    split: int
    replicated: int

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the last micro batch by `tensors`."""
        ...

    def reduced(self) -> None:
        """Finish what a backward pass has begun to send."""
        ...

    def publish(self, part: slice) -> None:
        """Begin to hand on tensors that were updated."""
        ...

    def published(self) -> None:
        """Finish handing on."""
        ...


class WholeWeights:
    """Every parameter whole: for one data parallel rank. See `Weights`."""

    together = 64
    """Tensors of one compiled update; a kernel's arguments are limited."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], replicas: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.tensors = [parameter.detach() for parameter in self._parameters]
        same = {id(parameter) for parameter in replicas}
        self.replicas = tuple(index for index, each in enumerate(self._parameters) if id(each) in same)
        self.shards = Axis(0, 1)
        self.replicated = sum(self.tensors[index].numel() for index in self.replicas)
        self.split = sum(tensor.numel() for tensor in self.tensors) - self.replicated

    def gradients(self) -> list[torch.Tensor]:
        """The parameters' own."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def reduced(self) -> None:
        """One rank has nothing to send."""

    def publish(self, part: slice) -> None:
        """The model multiplies with what is updated."""

    def published(self) -> None:
        """See `publish`."""


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master of a bfloat16 weight and its remainder (int16)."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def remainder_of(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `join` needs beside weight, the master in bfloat16 (rounded to nearest).

    Of the 65,536 masters of a weight one has a remainder of 32,768, for which 16 bits are one too few: that
    halfway to the next weight. It becomes its neighbour below, 2^-23 of its value away.
    """
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (master.view(torch.int32) - high).clamp(max=32767).to(torch.int16)


def adam_update(
    remainders: Sequence[torch.Tensor] | None,
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
) -> None:
    """One step of Adam or AdamW (Loshchilov and Hutter, arXiv 1711.05101) in torch's form, in place.

    remainders: of bfloat16 weights; None where weights are their own masters. scalars [4]: factor on the
    gradients, learning rate, and the bias corrections 1 - beta^step of both moments. decoupled: AdamW's decay
    of the weights; otherwise it is added to the gradient.
    """
    factor, lr, first_correction, second_correction = scalars.unbind()
    for index, (first, second, gradient, weight) in enumerate(
        zip(firsts, seconds, gradients, weights, strict=True)
    ):
        master = weight if remainders is None else join(weight, remainders[index])
        g = gradient.to(master.dtype) * factor
        if decoupled:
            master = master * (1.0 - lr * decay)
        else:
            g = g + master * decay
        first.lerp_(g, 1.0 - betas[0])
        second.mul_(betas[1]).addcmul_(g, g, value=1.0 - betas[1])
        denominator = (second / second_correction).sqrt() + eps
        master = master - lr * (first / first_correction) / denominator
        weight.copy_(master)
        if remainders is not None:
            remainders[index].copy_(remainder_of(master, weight))


def sgd_update(
    remainders: Sequence[torch.Tensor] | None,
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    decay: float,
) -> None:
    """One step of SGD without momentum in torch's form, in place: its decay is added to the gradient.

    Arguments as `adam_update`'s; of the scalars the first two.
    """
    factor, lr = scalars[:2].unbind()
    for index, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        master = weight if remainders is None else join(weight, remainders[index])
        master = master - lr * (gradient.to(master.dtype) * factor + master * decay)
        weight.copy_(master)
        if remainders is not None:
            remainders[index].copy_(remainder_of(master, weight))


def _update_of(config: Optimizer, compiled: bool) -> Update:
    """The update, with what does not change from step to step."""
    adam: Update = adam_update
    sgd: Update = sgd_update
    if compiled:
        from lora_suite.train.fast import update_kernels

        adam, sgd = update_kernels.adam_update, update_kernels.sgd_update
    kwargs = config.kwargs
    if config.name.endswith("SGD"):
        return partial(sgd, decay=kwargs.weight_decay)
    return partial(
        adam,
        betas=kwargs.betas,
        eps=kwargs.eps,
        decay=kwargs.weight_decay,
        decoupled=config.name.endswith("AdamW"),
    )


class MasterWeights:
    """Trains every parameter of a model, with the methods of an `AdapterBank`.

    weights: this rank's part, all of one dtype. compiled: whether a kernel makes the update.
    """

    def __init__(self, weights: Weights, topology: Topology, config: Optimizer, compiled: bool) -> None:
        self._of = weights
        self._topology = topology
        tensors = weights.tensors
        if len({each.dtype for each in tensors}) != 1:
            raise ValueError("weights of several dtypes are not updated together")
        narrow = tensors[0].dtype == torch.bfloat16
        dtype = torch.float32 if narrow else tensors[0].dtype
        self._remainders = [torch.zeros_like(each, dtype=torch.int16) for each in tensors] if narrow else None
        names = () if config.name.endswith("SGD") else ("first", "second")
        self._moments = {name: [torch.zeros_like(each, dtype=dtype) for each in tensors] for name in names}
        self._sums: list[torch.Tensor] | None = None
        self._config = config
        self._steps = 0
        self._scalars = torch.ones(4, dtype=dtype, device=tensors[0].device)
        # Each of the tensor parallel ranks has its part in the norm of what they hold alike.
        replicas = set(weights.replicas)
        counted = [1.0 / topology.tp.size if index in replicas else 1.0 for index in range(len(tensors))]
        self._counted = torch.tensor(counted, dtype=dtype, device=tensors[0].device)
        self._update = _update_of(config, compiled)

    def begin(self) -> None:
        """Forget the sums of the last step."""
        self._sums = None

    def reduced(self) -> None:
        """Finish what a backward pass has begun to send; part of every pass, captured or not."""
        self._of.reduced()

    def add(self) -> None:
        """Add the gradients of one micro batch of several, in the masters' precision."""
        gradients = self._of.gradients()
        if self._sums is None:
            self._sums = [gradient.to(self._scalars.dtype, copy=True) for gradient in gradients]
        else:
            torch._foreach_add_(self._sums, gradients)

    def _gradients(self) -> list[torch.Tensor]:
        return self._sums if self._sums is not None else self._of.gradients()

    def sync_gradients(self) -> None:
        """Make the gradients that tensor parallel ranks hold alike equal bit for bit.

        Data parallel ranks have summed theirs in the backward pass. What each tensor parallel rank has
        computed from the same states may differ in rounding, because kernels are chosen in each process; left
        alone, the replicas would drift apart.
        """
        tp = self._topology.tp
        if tp.size == 1 or not self._of.replicas:
            return
        gradients = self._gradients()
        ours = [gradients[index] for index in self._of.replicas]
        flat = tp.sum(torch.cat([gradient.flatten() for gradient in ours])).div_(tp.size)
        parts = torch.split(flat, [gradient.numel() for gradient in ours])
        torch._foreach_copy_(ours, [part.view_as(own) for part, own in zip(parts, ours, strict=True)])

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Note the factor that brings the gradients to `max_norm`; return the norm before."""
        norms = torch.stack(torch._foreach_norm(self._gradients(), dtype=self._scalars.dtype))
        square = (norms.square() * self._counted).sum()
        norm: torch.Tensor = self._of.shards.sum(self._topology.tp.sum(square)).sqrt()
        if max_norm is not None:
            # The same guard as torch.nn.utils.clip_grad_norm_, so that all arms clip alike.
            self._scalars[0] = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update masters and weights."""
        self._steps += 1
        corrections = [1.0 - beta**self._steps for beta in self._config.kwargs.betas]
        scalars = torch.tensor([lr, *corrections], dtype=self._scalars.dtype)
        # A copy that blocks would wait for all that the device has still to do.
        self._scalars[1:].copy_(scalars, non_blocking=True)
        lists = (*self._moments.values(), self._gradients(), self._of.tensors)
        for start in range(0, len(self._of.tensors), self._of.together):
            part = slice(start, start + self._of.together)
            self._update(
                None if self._remainders is None else self._remainders[part],
                *(each[part] for each in lists),
                self._scalars,
            )
            self._of.publish(part)
        self._of.published()

    def trainable_parameters(self) -> int:
        """Parameters of the whole model."""
        return self._of.split * self._topology.tp.size + self._of.replicated

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of weights, remainders and moments, in order, and the number of steps."""
        return {
            "weights": self._of.tensors,
            "remainders": self._remainders,
            "moments": self._moments,
            "steps": self._steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; tensors that differ in number, size or dtype are a KeyError."""
        theirs, ours = state.get("weights"), self._of.tensors
        # The plain paths keep weights by name.
        if not isinstance(theirs, list) or _kinds(ours) != _kinds(theirs):
            raise KeyError(
                "the checkpoint's tensors are of another model, another precision or another path through it "
                "(fast_path of policy.dtensor_cfg or policy.megatron_cfg)"
            )
        if state["moments"].keys() != self._moments.keys():
            raise KeyError("the checkpoint has the moments of another optimizer (policy.optimizer.name)")
        torch._foreach_copy_(ours, theirs)
        if self._remainders is not None:
            torch._foreach_copy_(self._remainders, state["remainders"])
        for name, moments in self._moments.items():
            torch._foreach_copy_(moments, state["moments"][name])
        self._of.publish(slice(None))
        self._of.published()
        self._steps = state["steps"]


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in tensors]
