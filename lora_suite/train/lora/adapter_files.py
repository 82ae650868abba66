# SPDX-License-Identifier: Apache-2.0
"""Adapter folders as they lie on disk: PEFT's, distributed checkpoints, and this trainer's own."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_suite.config.errors import ConfigError
from lora_suite.train.lora.names import place

CONFIG = "adapter_config.json"
SAFETENSORS, BINARY = "adapter_model.safetensors", "adapter_model.bin"
DCP_METADATA = ".metadata"
OWN_META = "meta.json"
# What a damaged file brings up: in the file system, in its structure, in a pickle.
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError),
    *(pickle.UnpicklingError, AttributeError, ImportError),
)


@dataclass(frozen=True)
class AdapterFolder:
    """The tensors of one adapter folder, on the CPU, and what its configuration says.

    form: `PEFT`, `distributed checkpoint` or `lora-suite checkpoint`. config: adapter_config.json, empty
    without one.
    """

    path: Path
    form: str
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]


def read_adapter(path: Path) -> AdapterFolder:
    """Read an adapter folder on one process; raises ConfigError for what is none or cannot be read.

    Of a distributed checkpoint only the adapters' tensors are read. Such a checkpoint's metadata is a Python
    pickle, which can run code: read only folders that you trust.
    """
    forms: tuple[tuple[str, Callable[[Path], AdapterFolder]], ...] = (
        (SAFETENSORS, _read_peft),
        (BINARY, _read_peft),
        (DCP_METADATA, _read_distributed),
        (OWN_META, _read_own),
    )
    for name, read in forms:
        if (path / name).is_file():
            try:
                return read(path)
            except _UNREADABLE as error:
                raise ConfigError(f"{path}: {name} cannot be read: {error}") from error
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    raise ConfigError(
        f"{path}: is no adapter folder: it has neither {SAFETENSORS} nor {BINARY} (PEFT), nor {DCP_METADATA} "
        f"(distributed checkpoint), nor {OWN_META} (a checkpoint of lora-suite)"
    )


def _read_peft(path: Path) -> AdapterFolder:
    config = _config(path)
    if not config:
        raise ConfigError(f"{path}: {CONFIG} is missing, without which PEFT loads nothing")
    if (path / SAFETENSORS).is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path / SAFETENSORS)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    else:
        tensors = torch.load(path / BINARY, map_location="cpu", weights_only=True)
    return AdapterFolder(path, "PEFT", tensors, config)


def _read_distributed(path: Path) -> AdapterFolder:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        # Optimizer states carry the parameter's name.
        if isinstance(entry, TensorStorageMetadata) and place(name) and not name.startswith("optim")
    }
    if tensors:
        with warnings.catch_warnings():
            # That there is one process alone is meant.
            warnings.simplefilter("ignore", UserWarning)
            load(dict(tensors), storage_reader=reader, no_dist=True)
    return AdapterFolder(path, "distributed checkpoint", tensors, _config(path))


def _read_own(path: Path) -> AdapterFolder:
    meta = json.loads((path / OWN_META).read_text(encoding="utf-8"))
    lora = meta["lora"]
    if lora is None:
        raise ConfigError(f"{path}: is a checkpoint of full SFT and has no adapters")
    tensors = _whole_factors(path, meta["layout"], int(lora["dim"]))
    config = {"r": lora["dim"], "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"]}
    if meta.get("model") is not None:
        config["base_model_name_or_path"] = meta["model"]
    return AdapterFolder(path, "lora-suite checkpoint", tensors, config)


def _whole_factors(path: Path, layout: Mapping[str, int], rank: int) -> dict[str, torch.Tensor]:
    """The factors of one of our checkpoints, whole: from the first data parallel rank of every place.

    Ranks are neighbours in tensor parallelism first, then data parallelism, then the pipeline. Those of
    expert parallelism are neighbours in data parallelism; there is neither of the others then.
    """
    tp, ep, stage_size = layout["tp"], layout.get("ep", 1), layout["dp"] * layout["tp"]
    tensors = {}
    for stage in range(layout["pp"]):
        ranks = range(stage * stage_size, stage * stage_size + max(tp, ep))
        states = [
            torch.load(path / f"rank_{each}.pt", map_location="cpu", weights_only=True)["backend"]
            for each in ranks
        ]
        sharded = set(states[0]["sharded"]) if tp > 1 else set()
        experts = states[0].get("experts", {})
        for key in states[0]["factors"]:
            module, _, factor = key.rpartition(".")
            shape: tuple[int, ...]
            shape, dim = ((rank, -1), 1) if factor == "a" else ((-1, rank), 0)
            if key in experts:
                shape, dim = (experts[key], *shape), 0
                sharded |= {key} if ep > 1 else set()
            parts = [state["factors"][key].view(shape) for state in states]
            whole = _joined(module, parts, dim) if key in sharded else parts[0]
            tensors[f"{module}.lora_{factor.upper()}.weight"] = whole
    return tensors


def _joined(module: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Ranks' parts of a factor, together. Of B of a fused gate/up each has rows of gate, then rows of up."""
    if dim == 0 and module.endswith(".linear_fc1"):
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        parts = [*gates, *ups]
    return torch.cat(parts, dim)


def _config(path: Path) -> dict[str, Any]:
    """adapter_config.json, empty where there is none; raises ConfigError."""
    if not (path / CONFIG).is_file():
        return {}
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / CONFIG}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path / CONFIG}: must hold an object")
    return config
