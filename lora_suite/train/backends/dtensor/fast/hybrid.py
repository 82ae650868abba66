# SPDX-License-Identifier: Apache-2.0
"""A plain NemotronH: Mamba-2, attention, dense or routed MLPs, one of them a layer, on stacked linears.

It computes what transformers' modules compute, from the same tensors. Both arms of a pair use it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from lora_suite.blueprint.shape import ModelShape
from lora_suite.train.backends.dtensor.fast.decoder import MakeLinear
from lora_suite.train.backends.dtensor.fast.layered import LayeredModel
from lora_suite.train.fast.collectives import ExpertParallel
from lora_suite.train.fast.experts import Experts, route, routed_mlp
from lora_suite.train.fast.linears import FramedLinear, StackedLinear
from lora_suite.train.models.attention import Blocks, attend_in_rows
from lora_suite.train.models.causal_lm import WeightSource
from lora_suite.train.models.initialise import Weight
from lora_suite.train.models.mamba import MambaSizes, MambaWeights, Recurrence, mix
from lora_suite.train.models.router import Routes, choose

STACKS = {
    "qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "o": ("mixer.o_proj",),
    "projection": ("mixer.in_proj",),
    "out": ("mixer.out_proj",),
    "up": ("mixer.up_proj",),
    "down": ("mixer.down_proj",),
    "shared_up": ("mixer.shared_experts.up_proj",),
    "shared_down": ("mixer.shared_experts.down_proj",),
    "experts_up": ("mixer.experts.up_proj",),
    "experts_down": ("mixer.experts.down_proj",),
}
"""The stacked linears of the layers, and the linears that each holds, by transformers' names."""

MakeExperts = Callable[[str, int, int, int], Experts]
"""From (layer's name and stack, experts of this rank, input features, output features) to the module."""

MakeTensor = Callable[..., nn.Parameter]
"""From a tensor's size, and its dtype where it is not the model's, to the tensor."""


@dataclass(frozen=True)
class Parts:
    """What the layers of a model are made of and computed with.

    eps: of the norms. through: computes the recurrence of Mamba layers, plain torch where it is None. ep: the
    ranks that split routed experts, each of which has a run of them.
    """

    shape: ModelShape
    mamba: MambaSizes
    routes: Routes
    eps: float
    through: Recurrence | None
    linear: MakeLinear
    experts: MakeExperts
    tensor: MakeTensor
    ep: ExpertParallel


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / root mean square of its last dim, times weight; in float32 at least, and then in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """relu(x)²."""
    return functional.relu(x).square()


class HybridLayer(nn.Module):
    """A mixer with a norm before and a residual around. Subclasses say what the mixer is."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.name = name
        self.eps = parts.eps
        self.norm = parts.tensor(parts.shape.hidden)

    def forward(self, x: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """x [rows, length, hidden] to the same; blocks: of packed rows, which are x's only one."""
        return x + self.mixed(rms_norm(x, self.norm, self.eps), blocks)

    @abstractmethod
    def mixed(self, x: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
        """What the mixer makes of x [rows, length, hidden]."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by transformers' name, as a view of where it lies."""
        yield f"{self.name}.norm.weight", self.norm.detach()
        for attribute, name in EXTRAS.items():
            tensor = getattr(self, attribute, None)
            if tensor is not None:
                yield f"{self.name}.mixer.{name}", tensor.detach()
        for stack, names in STACKS.items():
            linear = getattr(self, stack, None)
            if linear is None:
                continue
            if not isinstance(linear, StackedLinear | FramedLinear):
                yield f"{self.name}.{names[0]}", linear.weight.detach()
                continue
            for kind in ("weight", "bias"):
                if getattr(linear, kind) is not None:
                    for name, part in zip(names, linear.parts(kind), strict=True):
                        yield f"{self.name}.{name}.{kind}", part


EXTRAS = {
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "d": "D",
    "gated_norm": "norm.weight",
    "router": "gate.weight",
    "correction": "gate.e_score_correction_bias",
}
"""Tensors of the mixers besides their linears, by attribute, and transformers' names of them."""


class MambaLayer(HybridLayer):
    """Mamba-2."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name, parts)
        sizes, hybrid = parts.mamba, parts.shape.hybrid
        assert hybrid is not None
        self.sizes, self.through = sizes, parts.through
        hidden, bias = parts.shape.hidden, hybrid.mamba_bias
        self.conv = parts.tensor(sizes.conv_channels, 1, sizes.kernel)
        self.conv_bias = parts.tensor(sizes.conv_channels) if hybrid.conv_bias else None
        self.dt_bias, self.a_log, self.d = (parts.tensor(sizes.heads) for _ in range(3))
        self.gated_norm = parts.tensor(sizes.inner)
        self.projection = parts.linear(f"{name}.projection", hidden, (sizes.projected,), bias)
        self.out = parts.linear(f"{name}.out", sizes.inner, (hidden,), bias)

    def mixed(self, x: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
        """What the mixer makes of x [rows, length, hidden]."""
        projected = self.projection(x.flatten(0, 1)).view(*x.shape[:2], -1)
        weights = MambaWeights(self.conv, self.conv_bias, self.dt_bias, self.a_log, self.d, self.gated_norm)
        positions = None if blocks is None else blocks.positions
        states = mix(projected, weights, self.sizes, positions, self.through)
        out: torch.Tensor = self.out(states.flatten(0, 1))
        return out.view(x.shape)


class AttentionLayer(HybridLayer):
    """Causal attention; its positions come from the Mamba layers, so there is no rotary embedding."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name, parts)
        shape = parts.shape
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = parts.linear(f"{name}.qkv", shape.hidden, (queries, keys, keys), shape.qkv_bias)
        self.o = parts.linear(f"{name}.o", queries, (shape.hidden,), shape.o_bias)

    def mixed(self, x: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
        """What the mixer makes of x [rows, length, hidden]."""
        states = self.qkv(x.flatten(0, 1)).view(*x.shape[:2], -1, self.head_dim)
        query, key, value = torch.split(states, [self.heads, self.kv_heads, self.kv_heads], 2)
        context = attend_in_rows(query, key, value, blocks)
        out: torch.Tensor = self.o(context.reshape(x.shape[0] * x.shape[1], -1))
        return out.view(x.shape)


class MlpLayer(HybridLayer):
    """A dense MLP without a gate."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name, parts)
        shape = parts.shape
        self.up = parts.linear(f"{name}.up", shape.hidden, (shape.intermediate,), shape.mlp_bias)
        self.down = parts.linear(f"{name}.down", shape.intermediate, (shape.hidden,), shape.mlp_bias)

    def mixed(self, x: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
        """What the mixer makes of x [rows, length, hidden]."""
        out: torch.Tensor = self.down(relu2(self.up(x.flatten(0, 1))))
        return out.view(x.shape)


class MoeLayer(HybridLayer):
    """Routed experts, and one that every token meets.

    Where ranks split the experts, each sees the tokens of all of these ranks, and gives its part of the sum.
    """

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__(name, parts)
        shape, hybrid = parts.shape, parts.shape.hybrid
        assert hybrid is not None
        self.routes, self.ep = parts.routes, parts.ep
        count = hybrid.experts // parts.ep.size
        self.own = range(parts.ep.index * count, (parts.ep.index + 1) * count)
        hidden, width, shared = shape.hidden, hybrid.expert_intermediate, hybrid.shared_intermediate
        # The router is kept and computed in float32 at least, and does not train, nor does its correction.
        self.router = parts.tensor(hybrid.experts, hidden, wide=True)
        self.correction = parts.tensor(hybrid.experts, wide=True)
        for each in (self.router, self.correction):
            each.requires_grad_(False)
        self.experts_up = parts.experts(f"{name}.experts_up", count, hidden, width)
        self.experts_down = parts.experts(f"{name}.experts_down", count, width, hidden)
        self.shared_up = parts.linear(f"{name}.shared_up", hidden, (shared,), shape.mlp_bias)
        self.shared_down = parts.linear(f"{name}.shared_down", shared, (hidden,), shape.mlp_bias)

    def mixed(self, x: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
        """What the mixer makes of x [rows, length, hidden]."""
        tokens = x.flatten(0, 1)
        chosen, weights = choose(tokens, self.router, self.correction, self.routes)
        chosen, weights, everyone = map(self.ep.gather, (chosen, weights, tokens))
        routing = route(chosen, weights, self.routes.experts, self.own)
        y = self.ep.scatter(routed_mlp(everyone, routing, self.experts_up, self.experts_down))
        shared: torch.Tensor = self.shared_down(relu2(self.shared_up(tokens)))
        return (y + shared).view(x.shape)


LAYERS: dict[str, type[HybridLayer]] = {
    "mamba": MambaLayer,
    "attention": AttentionLayer,
    "mlp": MlpLayer,
    "moe": MoeLayer,
}


class HybridDecoder(LayeredModel):
    """Embedding, layers, last norm and head; `forward` gives the states that the head multiplies."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        shape, hybrid = parts.shape, parts.shape.hybrid
        assert hybrid is not None
        self.eps = parts.eps
        self.embedding = parts.tensor(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(
            LAYERS[mixer](f"model.layers.{index}", parts) for index, mixer in enumerate(hybrid.pattern)
        )
        self.norm = parts.tensor(shape.hidden)
        self.head = self.embedding if shape.tied_head else parts.tensor(shape.vocab, shape.hidden)

    def _through(
        self,
        input_ids: torch.Tensor,
        blocks: Blocks | None,
        layers: Iterable[Callable[[torch.Tensor, Blocks | None], torch.Tensor]],
    ) -> torch.Tensor:
        x = functional.embedding(input_ids, self.embedding)
        for layer in layers:
            x = layer(x, blocks)
        return rms_norm(x, self.norm, self.eps)

    def by_layer(self) -> Iterator[list[nn.Module]]:
        """The linears of every layer, those of experts among them."""
        for layer in self.layers:
            yield [getattr(layer, stack) for stack in STACKS if hasattr(layer, stack)]

    def replicas(self) -> Iterator[nn.Parameter]:
        """The parameters that train and are of no linear, of neither embedding nor head."""
        for layer in self.layers:
            yield from (each for each in layer.parameters(recurse=False) if each.requires_grad)
        yield self.norm

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by transformers' name, as a view of where it lies; a tied head once."""
        yield "model.embeddings.weight", self.embedding.detach()
        for layer in self.layers:
            assert isinstance(layer, HybridLayer)
            yield from layer.named_tensors()
        yield "model.norm_f.weight", self.norm.detach()
        if self.head is not self.embedding:
            yield "lm_head.weight", self.head.detach()

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill every weight."""
        for name, tensor in self.named_tensors():
            tensor.copy_(source(Weight(name, tuple(tensor.shape))))
