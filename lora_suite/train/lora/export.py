# SPDX-License-Identifier: Apache-2.0
"""An adapter folder of any form, in PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lora_suite.blueprint.shape import ModelShape, read_shape
from lora_suite.config.errors import ConfigError
from lora_suite.train.backends.megatron.fused import canonical_factors, is_megatrons
from lora_suite.train.lora.adapter_files import AdapterFolder
from lora_suite.train.lora.names import few
from lora_suite.train.lora.peft_format import Factors, factors_of, scale_of, write_peft_adapter


class _Kind(NamedTuple):
    """What the folder says of its adapters."""

    rank: int
    alpha: float
    dropout: float


def export_adapter(folder: AdapterFolder, directory: Path, base: str | None) -> int:
    """Write the adapters of a folder in PEFT's format; return how many.

    base: name of the adapted model; None: what the folder says, if it does. Adapters with Megatron's names
    (`fused: true`) are split into those of the linears that a transformers model has, which needs the base's
    configuration; raises ConfigError where it is not there.
    """
    name = base if base is not None else folder.config.get("base_model_name_or_path")
    factors = plain_factors(folder, name)
    ranks = {a.shape[-2] for a, _ in factors.values()}
    if len(ranks) > 1:
        raise ConfigError(f"{folder.path}: adapters of ranks {sorted(ranks)}; only one rank can be written")
    (rank,) = ranks
    alpha, dropout = scale_of(folder, rank) * rank, float(folder.config.get("lora_dropout", 0.0))
    write_peft_adapter(directory, factors, _Kind(rank, alpha, dropout), name)
    return len(factors)


def plain_factors(folder: AdapterFolder, base: str | None) -> Factors:
    """The factors of a folder by the names of a transformers model's linears, fused ones split.

    base: folder, configuration file or hub name (in the hub's cache) of the adapted model; needed for fused
    adapters alone. Raises ConfigError where these cannot be split.
    """
    factors = factors_of(folder)
    fused = [name for name in factors if is_megatrons(name)]
    return canonical_factors(factors, _shape(folder, fused, base)) if fused else factors


def _shape(folder: AdapterFolder, fused: list[str], base: str | None) -> ModelShape:
    """The shape of the base, by whose heads fused adapters are split; raises ConfigError."""
    path = _config_path(base) if base is not None else None
    if path is None:
        raise ConfigError(
            f"{folder.path}: {few(fused, most=2)}: adapters of fused linears are split by the base's heads, "
            f"and its configuration is not here; name its folder or configuration file (--base)"
        )
    return read_shape(path)


def _config_path(base: str) -> Path | None:
    """The configuration of a model: a file, one in a folder, or one in the hub's cache; None without it."""
    path = Path(base).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    from transformers.utils.hub import cached_file

    try:
        cached = cached_file(base, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(cached) if cached is not None else None
