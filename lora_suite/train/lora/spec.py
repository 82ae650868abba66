# SPDX-License-Identifier: Apache-2.0
"""What kind of adapters: rank, scale, dropout, initialisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lora_suite.config.schema import DTensorLora, MegatronLora

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class LoraSpec:
    """One kind of adapter: y = x·Wᵀ + (alpha / rank) · dropout(x·Aᵀ)·Bᵀ, with A [rank, in], B [out, rank].

    dropout_position: `pre` drops the adapter's input x, `post` its output. dtype: of the copy of A and B that
    is multiplied with (None: the model's); the master copy is float32 (float64 for a float64 model). seed: of
    the initialisation; each factor draws from (seed, its name), so its values depend on no layout.
    """

    rank: int
    alpha: float
    dropout: float
    dropout_position: str
    a_init: str
    b_init: str
    dtype: torch.dtype | None
    seed: int

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @classmethod
    def from_config(cls, config: DTensorLora | MegatronLora, seed: int) -> LoraSpec:
        """Build from either backend's block; the dtensor block has no B init: B is zero there."""
        a_init: str
        b_init: str
        if isinstance(config, DTensorLora):
            a_init, b_init = config.lora_A_init, "zero"
        else:
            a_init, b_init = config.lora_A_init_method, config.lora_B_init_method
        return cls(
            rank=config.dim,
            alpha=config.alpha,
            dropout=config.dropout,
            dropout_position=config.dropout_position,
            a_init=a_init,
            b_init=b_init,
            dtype=DTYPES[config.lora_dtype] if config.lora_dtype else None,
            seed=seed,
        )


def initialise(tensor: torch.Tensor, method: str, generator: torch.Generator) -> None:
    """Fill a whole (unsharded) factor [out, in], or a stack of such of one for each expert, in place.

    xavier: normal with std sqrt(2 / (in + out)) (Glorot); uniform, kaiming: U(-1/sqrt(in), 1/sqrt(in)), which
    is kaiming_uniform with a = sqrt(5), torch's default for a linear; normal: std 0.02; zero.
    """
    fan_out, fan_in = tensor.shape[-2:]
    if method == "zero":
        tensor.zero_()
    elif method == "xavier":
        tensor.normal_(0.0, math.sqrt(2.0 / (fan_in + fan_out)), generator=generator)
    elif method in ("uniform", "kaiming"):
        bound = 1.0 / math.sqrt(fan_in)
        tensor.uniform_(-bound, bound, generator=generator)
    elif method == "normal":
        tensor.normal_(0.0, 0.02, generator=generator)
    else:
        raise ValueError(f"unknown initialisation {method!r}")
