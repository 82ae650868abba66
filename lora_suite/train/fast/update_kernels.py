# SPDX-License-Identifier: Apache-2.0
"""Triton kernels around the update: Adam or SGD over a tensor, and the adapters' factors into their frames.

Each does in one pass what a library does in several, and compiles in a second, where a compiler of tensor
programs takes a minute for all tensors of a model. Loaded where Triton and a GPU are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_COPIED = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _load_master(weight_of, remainder_of, index, inside, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of masters; split: a master is a bfloat16 weight (int16) and its remainder."""
    weight = tl.load(weight_of + index, mask=inside)
    if split:
        low = tl.load(remainder_of + index, mask=inside).to(tl.int32)
        return ((weight.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        return weight


@triton.jit  # type: ignore[untyped-decorator]
def _store_master(weight_of, remainder_of, index, inside, master, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a block of masters."""
    if split:
        # To the nearest of bfloat16, of two the even one.
        bits = master.to(tl.int32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(weight_of + index, high.to(tl.int16), mask=inside)
        tl.store(remainder_of + index, tl.minimum(bits - (high << 16), 32767).to(tl.int16), mask=inside)
    else:
        tl.store(weight_of + index, master, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    remainder_of, first_of, second_of, gradient_of, weight_of, scalars, size,
    beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr, decay: tl.constexpr,
    decoupled: tl.constexpr, split: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One step on a block of a tensor; split: the master is a bfloat16 weight (int16) and its remainder."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < size
    factor, lr = tl.load(scalars), tl.load(scalars + 1)
    first_correction, second_correction = tl.load(scalars + 2), tl.load(scalars + 3)
    master = _load_master(weight_of, remainder_of, index, inside, split)
    wide = master.dtype
    g = tl.load(gradient_of + index, mask=inside).to(wide) * factor
    if decoupled:
        master *= 1.0 - lr * decay
    else:
        g += master * decay
    first = tl.load(first_of + index, mask=inside).to(wide)
    second = tl.load(second_of + index, mask=inside).to(wide)
    first += (g - first) * (1.0 - beta1)
    second = second * beta2 + g * g * (1.0 - beta2)
    master -= lr * (first / first_correction) / (tl.sqrt(second / second_correction) + eps)
    _store_master(weight_of, remainder_of, index, inside, master, split)
    tl.store(first_of + index, first.to(first_of.dtype.element_ty), mask=inside)
    tl.store(second_of + index, second.to(second_of.dtype.element_ty), mask=inside)


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
    """`masters.adam_update` by a kernel for each tensor."""
    split = remainders is not None
    for remainder, first, second, gradient, weight in zip(
        remainders if remainders is not None else firsts, firsts, seconds, gradients, weights, strict=True
    ):
        size = weight.numel()
        held = weight.view(torch.int16) if split else weight
        _adam[(triton.cdiv(size, _BLOCK),)](
            remainder, first, second, gradient.contiguous(), held, scalars, size,
            beta1=betas[0], beta2=betas[1], eps=eps, decay=decay, decoupled=decoupled,
            split=split, block=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _sgd(  # type: ignore[no-untyped-def]
    remainder_of, gradient_of, weight_of, scalars, size,
    decay: tl.constexpr, split: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < size
    factor, lr = tl.load(scalars), tl.load(scalars + 1)
    master = _load_master(weight_of, remainder_of, index, inside, split)
    g = tl.load(gradient_of + index, mask=inside).to(master.dtype) * factor
    master -= lr * (g + master * decay)
    _store_master(weight_of, remainder_of, index, inside, master, split)


def sgd_update(
    remainders: Sequence[torch.Tensor] | None,
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    scalars: torch.Tensor,
    decay: float,
) -> None:
    """`masters.sgd_update` by a kernel for each tensor."""
    split = remainders is not None
    for remainder, gradient, weight in zip(
        remainders if remainders is not None else weights, gradients, weights, strict=True
    ):
        size = weight.numel()
        held = weight.view(torch.int16) if split else weight
        _sgd[(triton.cdiv(size, _BLOCK),)](
            remainder, gradient.contiguous(), held, scalars, size,
            decay=decay, split=split, block=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _copy_into_frames(source, like, table, scale, block: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.program_id(1) * 6
    # Within a frame 32 bits do, in which a GPU divides several times faster.
    rows, columns = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    stride = tl.load(entry + 4).to(tl.int32)
    index = tl.program_id(0) * block + tl.arange(0, block)
    if tl.program_id(0) * block < rows * columns:
        inside = index < rows * columns
        target = tl.load(entry).to(tl.pointer_type(like.dtype.element_ty))
        values = tl.load(source + tl.load(entry + 1) + index, mask=inside)
        values = tl.where(tl.load(entry + 5) != 0, values.to(tl.float32) * scale, values.to(tl.float32))
        place = target + (index // columns) * stride + index % columns
        tl.store(place, values.to(like.dtype.element_ty), mask=inside)


class FrameCopies:
    """Copies of the factors in one flat buffer to where they stand in frames, in one launch.

    source: the buffer that the factors are views of; factors and targets (2-D views of the frames) in one
    order; scaled: which of them are multiplied by `scale` on the way. None of these may move in memory.
    """

    def __init__(
        self,
        source: torch.Tensor,
        factors: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        scaled: Sequence[bool],
        scale: float,
    ) -> None:
        entries = [
            (
                target.data_ptr(),
                (factor.data_ptr() - source.data_ptr()) // source.element_size(),
                *factor.shape,
                target.stride(0),
                int(multiplied),
            )
            for factor, target, multiplied in zip(factors, targets, scaled, strict=True)
        ]
        self._table = torch.tensor(entries, dtype=torch.int64, device=source.device)
        self._source, self._targets, self._scale = source, list(targets), scale
        self._grid = triton.cdiv(max(factor.numel() for factor in factors), _COPIED), len(entries)

    def __call__(self) -> None:
        """Copy."""
        _copy_into_frames[self._grid](
            self._source, self._targets[0], self._table, self._scale, block=_COPIED, num_warps=8
        )
