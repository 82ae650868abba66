# SPDX-License-Identifier: Apache-2.0
"""A plain Llama-like decoder (Llama, Qwen2, Qwen3) on stacked linears, for one shape of batch at a time.

It computes what transformers' modules compute, from the same tensors, in fewer and larger products: queries,
keys and values at once, gate and up at once. Both arms of a pair use it.

Under tensor parallelism a rank has the heads, MLP channels and vocabulary of its index. Queries, keys,
values, gate and up are split by output, o and down by input, embedding and head by vocabulary: a rank that
held them whole would spend as much time and memory on each as before, for one sum of states less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from lora_suite.blueprint.shape import ModelShape
from lora_suite.train.backends.dtensor.fast.layered import LayeredModel
from lora_suite.train.backends.dtensor.parallel import placement_of
from lora_suite.train.fast.collectives import ALONE, TensorParallel
from lora_suite.train.fast.entry import Norm, normed, normed_linear, rms_norm
from lora_suite.train.fast.layer_ops import NO_KERNELS, LayerOps
from lora_suite.train.fast.linears import FramedLinear, StackedLinear
from lora_suite.train.fast.mlp import normed_mlp
from lora_suite.train.fast.rotary import Rotation, rotate, rotated
from lora_suite.train.models.attention import Blocks, attend_in_rows
from lora_suite.train.models.causal_lm import WeightSource
from lora_suite.train.models.initialise import Weight

STACKS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The stacked linears of a layer, and the linears that each holds, by transformers' names."""

MakeLinear = Callable[[str, int, tuple[int, ...], bool], StackedLinear | FramedLinear]
"""From (layer's name and stack, input features, output features of each linear, bias) to the module."""


def rotation_of(rotation: Rotation, length: int, blocks: Blocks | None) -> Rotation:
    """Of each slot of a row [length, head_dim], which holds packed rows where there are `blocks`."""
    cos, sin = rotation
    if blocks is not None:
        return cos[blocks.positions[0]], sin[blocks.positions[0]]
    return cos[:length], sin[:length]


def split_dim(name: str) -> int | None:
    """The dim over which tensor parallel ranks split a tensor of that name; None where each holds it whole.

    Biases of linears that are split by input are whole, and not for this decoder: they would be added once a
    rank.
    """
    linear, _, kind = name.rpartition(".")
    if linear in ("model.embed_tokens", "lm_head"):
        return 0
    return {"column": 0, "row": None if kind == "bias" else 1, "none": None}[placement_of(linear)]


@dataclass(frozen=True)
class Sizes:
    """What a layer's code asks of a shape."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, shape: ModelShape, eps: float) -> Sizes:
        """Of a model."""
        return cls(shape.heads, shape.kv_heads, shape.head_dim, eps)


def part_of(shape: ModelShape, ranks: int) -> ModelShape:
    """What one of `ranks` tensor parallel ranks has of a model."""
    return replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=shape.kv_heads // ranks,
        intermediate=shape.intermediate // ranks,
        vocab=shape.vocab // ranks,
    )


class DecoderLayer(nn.Module):
    """Attention and gated MLP with norms before and residuals around; shape: of this rank's part."""

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        sizes: Sizes,
        make: MakeLinear,
        norm: Callable[[int], nn.Parameter],
        ops: LayerOps,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.name = name
        self.tp = tp
        self.sizes = sizes
        self.ops = ops
        hidden, heads = shape.hidden, shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.input_layernorm = norm(hidden)
        self.post_attention_layernorm = norm(hidden)
        self.q_norm = norm(shape.head_dim) if shape.qk_norm else None
        self.k_norm = norm(shape.head_dim) if shape.qk_norm else None
        self.qkv = make(f"{name}.qkv", hidden, (heads, keys, keys), shape.qkv_bias)
        self.o = make(f"{name}.o", heads, (hidden,), shape.o_bias)
        self.gate_up = make(f"{name}.gate_up", hidden, (shape.intermediate,) * 2, shape.mlp_bias)
        self.down = make(f"{name}.down", shape.intermediate, (hidden,), shape.mlp_bias)

    def forward(
        self, x: torch.Tensor, fed: torch.Tensor | None, rotation: Rotation, blocks: Blocks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [rows, length, hidden] in two parts, whose sum belongs to the next norm, to the same.

        fed: the second part, of the MLP before. blocks: of packed rows, which are x's only one.
        """
        states, residual = normed_linear(
            x.flatten(0, 1),
            None if fed is None else fed.flatten(0, 1),
            self._norm(self.input_layernorm),
            self.qkv,
            self.tp,
        )
        mixed = self._attend(states.view(*x.shape[:2], -1, self.sizes.head_dim), rotation, blocks)
        norm = self._norm(self.post_attention_layernorm)
        made, states = normed_mlp(residual, mixed, norm, self.gate_up, self.down, self.ops.gated, self.tp)
        return states.view(x.shape), self.tp.leave(made).view(x.shape)

    def _norm(self, weight: nn.Parameter) -> Norm:
        return Norm(weight, self.sizes.eps, self.ops.norm)

    def _attend(self, states: torch.Tensor, rotation: Rotation, blocks: Blocks | None) -> torch.Tensor:
        """States [rows, length, heads of queries, keys and values, head_dim] to [tokens, hidden]."""
        sizes = self.sizes
        heads = (sizes.heads, sizes.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = torch.split(states, [*heads, sizes.kv_heads], 2)
            # Each rank sees its own heads, so the gradients of their norms are parts of sums.
            query = rotate(rms_norm(query, self.tp.enter(self.q_norm), sizes.eps), rotation)
            key = rotate(rms_norm(key, self.tp.enter(self.k_norm), sizes.eps), rotation)
        else:
            query, key, value = rotated(states, rotation, heads, self.ops.rotary)
        context = attend_in_rows(query, key, value, blocks)
        mixed: torch.Tensor = self.tp.leave(self.o(context.reshape(states.shape[0] * states.shape[1], -1)))
        return mixed


class Decoder(LayeredModel):
    """Embedding, layers, last norm and head; `forward` gives the states that the head multiplies.

    make: of each stack of linears. trained: whether the other tensors (embedding, norms, head) train.
    rotation: for the longest row that will come. A tied head is the embedding. ops: kernels to use. shape:
    of the whole model; its vocabulary, heads and MLP channels must divide by the tensor parallel ranks. anew:
    of so many layers, from the first, gate and up are not kept for the backward pass.
    """

    def __init__(
        self,
        shape: ModelShape,
        eps: float,
        rotation: Rotation,
        make: MakeLinear,
        *,
        trained: bool,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps = NO_KERNELS,
        tp: TensorParallel = ALONE,
        anew: int = 0,
    ) -> None:
        super().__init__()
        shape = part_of(shape, tp.size)

        def tensor(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=trained)

        self.eps = eps
        self.tp = tp
        self.embedding = tensor(shape.vocab, shape.hidden)
        sizes = Sizes.of(shape, eps)
        of_layer = [ops.with_products_anew() if index < anew else ops for index in range(shape.layers)]
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.layers.{index}", shape, sizes, make, tensor, each, tp)
            for index, each in enumerate(of_layer)
        )
        self.norm = tensor(shape.hidden)
        self.ops = ops
        self.head = self.embedding if shape.tied_head else tensor(shape.vocab, shape.hidden)
        self.rotation = rotation

    def _through(
        self,
        input_ids: torch.Tensor,
        blocks: Blocks | None,
        layers: Iterable[Callable[..., tuple[torch.Tensor, torch.Tensor]]],
    ) -> torch.Tensor:
        rotation = rotation_of(self.rotation, input_ids.shape[1], blocks)
        x, fed = self._embed(input_ids), None
        for layer in layers:
            x, fed = layer(x, fed, rotation, blocks)
        last = None if fed is None else fed.flatten(0, 1)
        normal, _ = normed(x.flatten(0, 1), last, Norm(self.norm, self.eps, self.ops.norm))
        return self.tp.enter(normal.view(x.shape))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return functional.embedding(input_ids, self.embedding)
        rows = len(self.embedding)
        mine = input_ids // rows == self.tp.index
        # A token of another rank's takes nothing of some row of ours: of many rows, by the remainder.
        return self.tp.leave(functional.embedding(input_ids % rows, self.embedding) * mine[..., None])

    def by_layer(self) -> Iterator[list[StackedLinear | FramedLinear]]:
        """The stacks of linears of each layer."""
        for layer in self.layers:
            yield [getattr(layer, stack) for stack in STACKS]

    def linears(self) -> Iterator[StackedLinear | FramedLinear]:
        """Every stack of linears, in order."""
        for linears in self.by_layer():
            yield from linears

    def replicas(self) -> Iterator[nn.Parameter]:
        """The parameters that all tensor parallel ranks hold alike: the norms'."""
        for layer in self.layers:
            yield from layer.parameters(recurse=False)
        yield self.norm

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of this rank's part of every weight, by transformers' name; a tied head once."""
        yield "model.embed_tokens.weight", self.embedding.detach()
        for layer in self.layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer.name}.{name}.weight", getattr(layer, name).detach()
            for name in ("q_norm", "k_norm"):
                if getattr(layer, name) is not None:
                    yield f"{layer.name}.self_attn.{name}.weight", getattr(layer, name).detach()
            for stack, names in STACKS.items():
                linear = getattr(layer, stack)
                for kind in ("weight", "bias"):
                    if getattr(linear, kind) is not None:
                        for name, part in zip(names, linear.parts(kind), strict=True):
                            yield f"{layer.name}.{name}.{kind}", part
        yield "model.norm.weight", self.norm.detach()
        if self.head is not self.embedding:
            yield "lm_head.weight", self.head.detach()

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill every weight, or this rank's part of it."""
        for name, tensor in self.named_tensors():
            dim, shape = split_dim(name), list(tensor.shape)
            if dim is not None:
                shape[dim] *= self.tp.size
            whole = source(Weight(name, tuple(shape)))
            tensor.copy_(whole if dim is None else whole.chunk(self.tp.size, dim)[self.tp.index])
