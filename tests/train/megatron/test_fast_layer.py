# SPDX-License-Identifier: Apache-2.0
"""A layer of the fast path with kernels, in Triton's interpreter, against the same layer in plain torch.

megatron-core's linears need process groups; stand-ins that hold the same take their place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lora_suite.train.fast.collectives import ALONE
from lora_suite.train.fast.layer_ops import NO_KERNELS, LayerOps, layer_ops
from lora_suite.train.fast.linears import FramedLinear, beside_op, thin_ops
from tests.train.fast.interpreter import check_in_interpreter
from tests.train.fast.test_entry import EPS, SHAPE, close, results
from tests.train.fast.test_thin import framed

HEADS, KEYS, CHANNELS = SHAPE["heads"], SHAPE["kv_heads"], SHAPE["head_dim"]
QKV = (HEADS * CHANNELS, KEYS * CHANNELS, KEYS * CHANNELS)
GATE_UP = (SHAPE["intermediate"], SHAPE["intermediate"])


class Linear(nn.Module):
    """What the layer asks of megatron-core's parallel linears, on one rank."""

    def __init__(self, inputs: int, widths: tuple[int, ...], frame: FramedLinear | None) -> None:
        super().__init__()
        self.tp, self.frame = ALONE, frame
        if frame is None:
            self.weight = nn.Parameter(torch.randn(sum(widths), inputs) * 0.3)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = functional.linear(x, self.weight) if self.frame is None else self.frame(x)
        return y


def layer(rank: int | None, ops: LayerOps, head_norms: bool) -> Any:
    """Framed where there is a rank, trained whole where there is none."""
    from lora_suite.train.backends.megatron.fast.modules import FastLayer

    torch.manual_seed(0)

    def make(inputs: int, widths: tuple[int, ...], groups: int = 1) -> Linear:
        if rank is None:
            return Linear(inputs, widths, None)
        frame = framed(inputs, widths, range(len(widths)), rank, joined=True, groups=groups)
        if ops.gated is not None:
            frame.beside = beside_op()
            frame.use(thin_ops())
        return Linear(inputs, widths, frame)

    def norm(width: int) -> nn.RMSNorm:
        made = nn.RMSNorm(width, eps=EPS)
        made.weight = nn.Parameter(torch.rand(width) + 0.5, requires_grad=rank is None)
        return made

    attention = nn.Module()
    attention.linear_qkv = make(SHAPE["hidden"], QKV, KEYS)
    attention.linear_proj = make(QKV[0], (SHAPE["hidden"],))
    attention.q_layernorm, attention.k_layernorm = (
        (norm(CHANNELS), norm(CHANNELS)) if head_norms else (None, None)
    )
    attention.num_attention_heads_per_partition = HEADS
    attention.num_query_groups_per_partition = KEYS
    attention.hidden_size_per_attention_head = CHANNELS
    mlp = nn.Module()
    mlp.linear_fc1, mlp.linear_fc2 = (
        make(SHAPE["hidden"], GATE_UP),
        make(SHAPE["intermediate"], (SHAPE["hidden"],)),
    )
    plain = SimpleNamespace(
        input_layernorm=norm(SHAPE["hidden"]),
        self_attention=attention,
        pre_mlp_layernorm=norm(SHAPE["hidden"]),
        mlp=mlp,
    )
    return FastLayer(plain, ops)  # type: ignore[arg-type]


def check_layer(rank: int | None, first: bool, head_norms: bool) -> None:
    """Outputs and every gradient, written and compiled; first: after an embedding."""
    x = torch.randn(2, 5, SHAPE["hidden"]).requires_grad_(not first or rank is None)
    fed = None if first else torch.randn(2, 5, SHAPE["hidden"], requires_grad=True)
    dy = [torch.randn(2, 5, SHAPE["hidden"]) for _ in range(2)]
    right, wanted = results(layer(rank, NO_KERNELS, head_norms), None, x, fed, dy)
    for compiled in (None, "aot_eager"):
        y, found = results(layer(rank, layer_ops(torch.float32), head_norms), compiled, x, fed, dy)
        for got, each in zip((*y, *found), (*right, *wanted), strict=True):
            close(got, each, 1e-4)


def in_interpreter() -> None:
    torch.manual_seed(0)
    for rank in (None, 3):
        for first in (True, False):
            check_layer(rank, first, head_norms=False)
    check_layer(3, False, head_norms=True)
    print("equal")


@pytest.mark.slow
def test_kernels_give_what_plain_torch_gives() -> None:
    check_in_interpreter("from tests.train.megatron.test_fast_layer import in_interpreter as check; check()")
