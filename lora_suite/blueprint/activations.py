# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training keeps of its activations from the forward pass to the backward pass.

Counted is what autograd saves of each operation, once where operations share it. h: hidden channels; q, k:
channels of queries and of keys; I: those of the MLP; w: bytes of an element, W: of one in float32 or wider.

    what                  transformers' modules                       the fast path, compiled
    a norm                its input in float32, h·W (and its output   its input, h·w
                          before the weight, where that trains)
    linears of one input  the input, h·w, where a weight or an adapter of theirs trains
    attention             queries, keys, values, output, (2 q + 2 k)·w, and logsumexp, 4 bytes a head; the
                          output is o's input; what norms of queries and keys read, as of a norm
    gated MLP             gate, silu(gate), up, and their product     gate and up, and the product: 3 I·w
                          (down's input), 4 I·w
    other linears         input and output of each: experts as often as a token meets them
    Mamba                 besides its linears what the convolution gives, and the gated norm's input in
                          float32; what the scan keeps is left out

Selective checkpointing keeps on the fast path neither the inputs of q, k, v and of gate and up, except where
a norm has no gradient, nor the MLP's product. Of transformers' modules it keeps a layer's input, and what
linears and attention give. Of the first layers, as many as asked for, gate and up are not kept either; of
transformers' modules nothing but the input.

The fast path of a hybrid model keeps of experts one input, h·w, and the hidden states of those that a token
meets, both for the tokens of all ranks that split the experts; of the shared one its hidden states before and
after the activation, and with adapters a copy of the input; of Mamba the projection, the convolution's
output, the scan's input and output and one decay a head. Rows are sorted by expert anew in the backward pass,
and the scan's states are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_suite.blueprint.layout import COLUMN, ROW
from lora_suite.blueprint.linears import Linear, conv_channels
from lora_suite.blueprint.shape import HybridShape, ModelShape

_APART = ("mamba_in", "mamba_out", "experts", "shared")


@dataclass(frozen=True)
class Keeping:
    """How activations are kept.

    width: bytes of an element. lean: the fast path, compiled. full: every weight trains. needs_input: whether
    a linear's input is kept for a gradient of its own. tensor: ranks that split heads and MLP channels;
    sequence: whether they also split what lies between. expert: ranks that split routed experts. selective:
    whether what is cheap is computed anew. anew: of so many layers, from the first, gate and up, too.
    """

    width: int
    lean: bool
    full: bool
    needs_input: Callable[[Linear], bool]
    tensor: int = 1
    sequence: bool = False
    expert: int = 1
    selective: bool = False
    anew: int = 0

    @property
    def wide(self) -> int:
        """Bytes of an element where the computation is in float32 at least."""
        return max(self.width, 4)


def kept_by_layer(shape: ModelShape, linears: Sequence[Linear], keeping: Keeping) -> list[float]:
    """Bytes a token that each layer keeps."""
    by_layer: list[list[Linear]] = [[] for _ in range(shape.layers)]
    for linear in linears:
        if linear.layer is not None:
            by_layer[linear.layer].append(linear)
    if keeping.selective and not keeping.lean:
        kept = [_products(shape, members, keeping) for members in by_layer[keeping.anew :]]
        return [*keeping.anew * [float(shape.hidden * keeping.width)], *kept]
    return [_of_layer(shape, members, keeping, index) for index, members in enumerate(by_layer)]


def _products(shape: ModelShape, linears: Sequence[Linear], keeping: Keeping) -> float:
    """The input of a layer, and what its linears and attention give."""
    whole = shape.hidden * (1 + sum(each.kind in ROW for each in linears))
    split = sum(each.out_features for each in linears if each.kind in COLUMN)
    split += shape.heads * shape.head_dim
    attention = 4.0 * shape.heads / keeping.tensor
    return float((whole + split / keeping.tensor) * keeping.width + attention)


def _of_layer(shape: ModelShape, linears: Sequence[Linear], keeping: Keeping, index: int) -> float:
    kinds = {linear.kind: linear for linear in linears}
    whole = _norms(shape, keeping)
    split = 0.0
    if "q" in kinds:
        # With adapters nothing before the first norm trains, so that it has no gradient.
        if not keeping.selective or (index == 0 and not keeping.full):
            whole += _shared_input(linears, ("q", "k", "v"), shape.hidden, keeping)
        split += _attention(shape, keeping)
    if "gate" in kinds:
        if not keeping.selective:
            whole += _shared_input(linears, ("gate", "up"), shape.hidden, keeping)
        # One operation with both linears makes the product anew.
        anew = keeping.selective and any(keeping.needs_input(kinds[kind]) for kind in ("gate", "up"))
        if index >= keeping.anew:
            split += _gated(shape.intermediate, keeping, keeping.needs_input(kinds["down"]) and not anew)
    elif "up" in kinds:
        split += sum(_both_ends(kinds[kind], keeping) for kind in ("up", "down") if kind in kinds)
    if keeping.lean and shape.hybrid is not None:
        return whole + split + _lean_mixer(shape.hybrid, linears, keeping)
    apart = sum(_both_ends(linear, keeping) for linear in linears if linear.kind in _APART)
    if "mamba_in" in kinds and shape.hybrid is not None:
        inner = shape.hybrid.mamba_heads * shape.hybrid.mamba_head_dim
        apart += conv_channels(shape.hybrid) * keeping.width + inner * keeping.wide
    return whole / (keeping.tensor if keeping.sequence else 1) + split / keeping.tensor + apart


def _lean_mixer(hybrid: HybridShape, linears: Sequence[Linear], keeping: Keeping) -> float:
    """What a Mamba mixer or experts keep on the fast path."""
    elements = decays = 0.0
    by_kind: dict[str, list[Linear]] = {}
    for linear in linears:
        by_kind.setdefault(linear.kind, []).append(linear)
    if "mamba_in" in by_kind:
        (projection,), (out,) = by_kind["mamba_in"], by_kind["mamba_out"]
        elements += projection.out_features + conv_channels(hybrid) + 2 * out.in_features
        elements += sum(each.in_features for each in (projection, out) if keeping.needs_input(each))
        decays = 4.0 * hybrid.mamba_heads
    if "experts" in by_kind:
        up = by_kind["experts"][0]
        elements += keeping.expert * (up.in_features + up.active * up.out_features)
        wide, narrow = by_kind["shared"]
        elements += wide.out_features
        elements += wide.in_features if keeping.needs_input(wide) and not keeping.full else 0
        elements += narrow.in_features if keeping.needs_input(narrow) else 0
    return elements * keeping.width + decays


def _norms(shape: ModelShape, keeping: Keeping) -> float:
    each = keeping.width if keeping.lean else keeping.wide
    if keeping.full and not keeping.lean:
        each += keeping.width
    return float((1 if shape.hybrid else 2) * shape.hidden * each)


def _shared_input(linears: Sequence[Linear], kinds: tuple[str, ...], size: int, keeping: Keeping) -> float:
    kept = any(linear.kind in kinds and keeping.needs_input(linear) for linear in linears)
    return float(size * keeping.width) if kept else 0.0


def _attention(shape: ModelShape, keeping: Keeping) -> float:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = (2 * queries + 2 * keys) * keeping.width + 4.0 * shape.heads
    if shape.qk_norm:
        kept += (queries + keys) * (keeping.width if keeping.lean else keeping.wide)
    return kept


def _gated(channels: int, keeping: Keeping, keeps_product: bool) -> float:
    tensors = (2 if keeping.lean else 3) + (1 if keeps_product else 0)
    return float(tensors * channels * keeping.width)


def _both_ends(linear: Linear, keeping: Keeping) -> float:
    return float(linear.active * (linear.in_features + linear.out_features) * keeping.width)
