# SPDX-License-Identifier: Apache-2.0
"""An adapter folder of any form, in PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.adapter_files import AdapterFolder
from lora_suite.train.lora.names import few
from lora_suite.train.lora.peft_format import factors_of, scale_of, write_peft_adapter

_MEGATRON = "decoder."


class _Kind(NamedTuple):
    """What the folder says of its adapters."""

    rank: int
    alpha: float
    dropout: float


def export_adapter(folder: AdapterFolder, directory: Path, base: str | None) -> int:
    """Write the adapters of a folder in PEFT's format; return how many.

    base: name of the adapted model; None: what the folder says, if it does. Raises ConfigError for adapters
    that have Megatron's names (`fused: true`): no linear of a transformers model is called so.
    """
    factors = factors_of(folder)
    fused = [name for name in factors if name.startswith(_MEGATRON)]
    if fused:
        raise ConfigError(
            f"{folder.path}: {few(fused)}: adapters of fused linears, which a transformers model has not; "
            "train with policy.megatron_cfg.lora_cfg.fused=false to export them"
        )
    ranks = {a.shape[0] for a, _ in factors.values()}
    if len(ranks) > 1:
        raise ConfigError(f"{folder.path}: adapters of ranks {sorted(ranks)}; only one rank can be written")
    (rank,) = ranks
    alpha, dropout = scale_of(folder, rank) * rank, float(folder.config.get("lora_dropout", 0.0))
    name = base if base is not None else folder.config.get("base_model_name_or_path")
    write_peft_adapter(directory, factors, _Kind(rank, alpha, dropout), name)
    return len(factors)
