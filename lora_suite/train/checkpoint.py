# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one file a rank, visible under their name only when they are whole."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lora_suite.config import ConfigError, differences
from lora_suite.config.schema import Checkpointing, Recipe
from lora_suite.launch.record import write_json_atomically
from lora_suite.train.topology import Topology

_NAME = re.compile(r"step_(\d+)")
_META = "meta.json"


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of itself.

    layout: backend, world size and axes; lora: the LoRA block, None for full SFT. A training can only
    continue from a checkpoint that agrees in both. batch: fingerprint of the step's batch. metric: value that
    decides which checkpoints are kept, None if there was none. model: its name, for exported adapters.
    """

    step: int
    layout: dict[str, Any]
    lora: dict[str, Any] | None
    recipe_hash: str
    batch: str
    metric: float | None
    model: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Meta:
        """Read the meta.json of a checkpoint's folder."""
        return cls(**json.loads((folder / _META).read_text(encoding="utf-8")))


def layout_of(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """The parallel layout that a rank's file belongs to."""
    return {
        "backend": recipe.policy.backend,
        "dp_replicas": topology.dp_replicas,
        "world_size": topology.world_size,
        "dp": topology.dp.size,
        "tp": topology.tp.size,
        **({"ep": topology.ep.size} if topology.ep.size > 1 else {}),
        "pp": topology.pp.size,
    }


def lora_of(recipe: Recipe) -> dict[str, Any] | None:
    """The LoRA block where it is on."""
    lora = recipe.policy.lora
    return lora.model_dump(mode="json") if lora.enabled else None


class Checkpoints:
    """The checkpoints of one run.

    A save goes into ``step_N.tmp`` and is renamed to ``step_N`` after every rank has written its file, so a
    save that was cut short is never loaded.
    """

    def __init__(self, folder: Path, config: Checkpointing, topology: Topology) -> None:
        self.folder = folder
        self._config = config
        self._topology = topology

    def due(self, step: int, last_step: int) -> bool:
        """Whether step ends with a checkpoint: every `save_period` steps, and the last one."""
        return self._config.enabled and (step % self._config.save_period == 0 or step == last_step)

    def save(self, meta: Meta, state: Mapping[str, Any]) -> None:
        """Write this rank's state; every rank calls it. Then drop what `keep_top_k` no longer keeps."""
        final = self.folder / f"step_{meta.step}"
        temporary = final.with_suffix(".tmp")
        if self._topology.rank == 0:
            for cut_short in self.folder.glob("step_*.tmp"):
                shutil.rmtree(cut_short)
            temporary.mkdir(parents=True)
        self._barrier()
        torch.save(dict(state), temporary / f"rank_{self._topology.rank}.pt")
        self._barrier()
        if self._topology.rank == 0:
            write_json_atomically(temporary / _META, asdict(meta))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            self._prune()

    def newest(self) -> Path | None:
        """Folder of the newest whole checkpoint."""
        return max(self._complete(), key=_step, default=None)

    def load(
        self, folder: Path, layout: Mapping[str, Any], lora: Mapping[str, Any] | None
    ) -> tuple[Meta, dict[str, Any]]:
        """Read this rank's state; raises ConfigError if it is of another layout or other adapters."""
        meta = Meta.read(folder)
        for what, saved, wanted in (
            ("layout", meta.layout, layout),
            ("LoRA block", meta.lora or {"enabled": False}, lora or {"enabled": False}),
        ):
            differing = differences(saved, wanted)
            if differing:
                text = "; ".join(f"{key} is {old!r} there and {new!r} here" for key, old, new in differing)
                raise ConfigError(
                    f"{folder}: the checkpoint's {what} is not this recipe's ({text}); use the checkpoint's, "
                    "or start anew with checkpointing.resume=false in another run directory"
                )
        path = folder / f"rank_{self._topology.rank}.pt"
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"{path}: the checkpoint is damaged ({str(error).partition(chr(10))[0]}); "
                f"remove {folder} to continue from the one before"
            ) from error
        return meta, state

    def _complete(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [
            path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and (path / _META).is_file()
        ]

    def _prune(self) -> None:
        """Keep the newest checkpoint and the best `keep_top_k`: by the metric, or else by age."""
        keep = self._config.keep_top_k
        if keep is None:
            return
        newest_first = sorted(self._complete(), key=_step, reverse=True)
        # Sorting is stable: equal or missing values leave the newest in front.
        ranked = sorted(newest_first, key=self._badness) if self._config.metric_name else newest_first
        for path in newest_first[1:]:
            if path not in ranked[:keep]:
                # Invisible first, so that none is ever visible in part.
                shutil.rmtree(path.rename(path.with_suffix(".tmp")))

    def _badness(self, path: Path) -> float:
        value = Meta.read(path).metric
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self._config.higher_is_better else value

    def _barrier(self) -> None:
        if self._topology.world_size > 1:
            dist.barrier()


def metric_of(name: str | None) -> str | None:
    """The metric that a ``checkpointing.metric_name`` means: ``val:val_loss`` is ``validation/loss``."""
    if name is None:
        return None
    kind, _, rest = name.partition(":")
    prefix = {"val": "validation", "train": "train"}[kind]
    return f"{prefix}/{rest.removeprefix('val_')}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
