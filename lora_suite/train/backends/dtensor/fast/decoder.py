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
from lora_suite.train.backends.dtensor.parallel import placement_of
from lora_suite.train.fast.collectives import ALONE, TensorParallel
from lora_suite.train.fast.linears import FramedLinear, StackedLinear
from lora_suite.train.fast.mlp import GatedOps, gated_mlp
from lora_suite.train.models.attention import Blocks, packed_attention
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

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [positions, head_dim] of the rotary embedding, in the model's dtype."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / root mean square of its last dim, times weight; in float32 whatever x is, as transformers does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotation_of(rotation: Rotation, length: int, blocks: Blocks | None) -> Rotation:
    """Of each slot of a row [length, head_dim], which holds packed rows where there are `blocks`."""
    cos, sin = rotation
    if blocks is not None:
        return cos[blocks.positions[0]], sin[blocks.positions[0]]
    return cos[:length], sin[:length]


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding of x [rows, length, heads, channels]."""
    cos, sin = (each[None, :, None] for each in rotation)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def split_dim(name: str) -> int | None:
    """The dim over which tensor parallel ranks split a tensor of that name; None where each holds it whole.

    Biases of linears that are split by input are whole, and not for this decoder: they would be added once a
    rank.
    """
    linear = name.rpartition(".")[0]
    if linear in ("model.embed_tokens", "lm_head"):
        return 0
    return {"column": 0, "row": 1, "none": None}[placement_of(linear)]


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
        ops: GatedOps | None,
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

    def forward(self, x: torch.Tensor, rotation: Rotation, blocks: Blocks | None = None) -> torch.Tensor:
        """x [rows, length, hidden] to the same; blocks: of packed rows, which are x's only one."""
        x = x + self._attend(rms_norm(x, self.input_layernorm, self.sizes.eps), rotation, blocks)
        return x + self._feed(rms_norm(x, self.post_attention_layernorm, self.sizes.eps))

    def _attend(self, x: torch.Tensor, rotation: Rotation, blocks: Blocks | None) -> torch.Tensor:
        rows, length, hidden = x.shape
        sizes = self.sizes
        states = self.qkv(self.tp.enter(x.reshape(rows * length, hidden))).view(
            rows, length, -1, sizes.head_dim
        )
        query, key, value = states.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            # Each rank sees its own heads, so the gradients of their norms are parts of sums.
            query = rms_norm(query, self.tp.enter(self.q_norm), sizes.eps)
            key = rms_norm(key, self.tp.enter(self.k_norm), sizes.eps)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if blocks is not None:
            context = packed_attention(query[0], key[0], value[0], blocks, None)
        else:
            context = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                is_causal=True,
                enable_gqa=sizes.heads != sizes.kv_heads,
            ).transpose(1, 2)
        mixed = self.tp.leave(self.o(context.reshape(rows * length, -1)))
        return mixed.view(rows, length, hidden)

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        states = self.tp.enter(x.flatten(0, 1))
        return self.tp.leave(gated_mlp(states, self.gate_up, self.down, self.ops)).view(x.shape)


class Decoder(nn.Module):
    """Embedding, layers, last norm and head; `forward` gives the states that the head multiplies.

    make: of each stack of linears. trained: whether the other tensors (embedding, norms, head) train.
    rotation: for the longest row that will come. A tied head is the embedding. ops: of the gated activation,
    where there are kernels for it. shape: of the whole model; its vocabulary, heads and MLP channels must
    divide by the tensor parallel ranks.
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
        ops: GatedOps | None = None,
        tp: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        shape = part_of(shape, tp.size)

        def tensor(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=trained)

        self.eps = eps
        self.tp = tp
        self.embedding = tensor(shape.vocab, shape.hidden)
        sizes = Sizes.of(shape, eps)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.layers.{index}", shape, sizes, make, tensor, ops, tp)
            for index in range(shape.layers)
        )
        self.norm = tensor(shape.hidden)
        self.head = self.embedding if shape.tied_head else tensor(shape.vocab, shape.hidden)
        self.rotation = rotation

    def forward(self, input_ids: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """input_ids [rows, length] to normalised states [rows, length, hidden]; [1, slots] with `blocks`."""
        return self._through(input_ids, blocks, self.layers)

    def states(self, input_ids: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
        """The same by the layers' code as it is written, where they are compiled."""
        return self._through(input_ids, blocks, [layer.forward for layer in self.layers])

    def _through(
        self,
        input_ids: torch.Tensor,
        blocks: Blocks | None,
        layers: Iterable[Callable[[torch.Tensor, Rotation, Blocks | None], torch.Tensor]],
    ) -> torch.Tensor:
        rotation = rotation_of(self.rotation, input_ids.shape[1], blocks)
        x = self._embed(input_ids)
        for layer in layers:
            x = layer(x, rotation, blocks)
        return self.tp.enter(rms_norm(x, self.norm, self.eps))

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
