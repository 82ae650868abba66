# SPDX-License-Identifier: Apache-2.0
"""run.json: the record of one run, and the layout of the run directory it lives in.

The training writes the record when it starts and rewrites it as it goes; the launcher adds how the run ended.
Both go through `RunRecord.write`, which replaces the file atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Ended(BaseModel):
    """How a run ended.

    how: `done` (the training ended by itself and the driver reached its verdict), `failed` (own exit status),
    `killed` (a signal), `oom`, `timeout`, `interrupted`.
    status: the driver's exit status (128 + signal for a signal); of a run that is `done` it is the driver's
    verdict: 0 passed, 1 a check failed, 4 too few steps, 5 no limit for this GPU.
    rank, step: where it crashed, if known. last_lines: the end of the log.
    """

    model_config = ConfigDict(extra="forbid")

    how: Literal["done", "failed", "killed", "oom", "timeout", "interrupted"]
    status: int
    rank: int | None = None
    step: int | None = None
    message: str = ""
    last_lines: list[str] = Field(default_factory=list)


class Invariant(BaseModel):
    """One LoRA invariant as the training measured it, by name; `ok` None means not measured."""

    model_config = ConfigDict(extra="forbid")

    name: str
    ok: bool | None
    message: str


class FastPath(BaseModel):
    """Whether the training took its backend's fast path, why not if it did not, and whether it had to."""

    model_config = ConfigDict(extra="forbid")

    taken: bool
    reason: str
    required: bool


class Memory(BaseModel):
    """How weights are held over ranks, and what the memory model expects a rank to need.

    sharding: `replicate`, `hsdp` or `fsdp`; replicas, shards: how often weights are held, and over how many
    ranks each time. expected_gib: by what it is for, and their `total` at once; empty where the model's shape
    is not known. device_gib: of the GPU, None without one.
    """

    model_config = ConfigDict(extra="forbid")

    sharding: str
    replicas: int
    shards: int
    expected_gib: dict[str, float]
    device_gib: float | None


class FloorTerms(BaseModel):
    """Seconds of the last step's floor by term, and the largest term, as docs/performance.md has them."""

    model_config = ConfigDict(extra="forbid")

    arithmetic: float
    memory: float
    communication: float
    update: float
    bound_by: str


class Environment(BaseModel):
    """What must be equal for two runs to be comparable (`strict`), and what is merely noted (`soft`)."""

    model_config = ConfigDict(extra="forbid")

    strict: dict[str, Any]
    soft: dict[str, Any]


class RunRecord(BaseModel):
    """The content of run.json.

    batches: fingerprint of the global batch per step. dialect: by which an external run's metrics were read,
    None for a run of our trainer. segments: first step of each (re)start.
    nonfinite: per metric, the steps whose value was not finite (null in metrics.json).
    peak_rank: per memory metric, the rank that held the maximum. link: of the run at Weights & Biases, or the
    folder of its offline files, relative to the run directory; empty without either.
    memory: of our trainer. floor: where the GPU's peaks are known.
    metrics_sha256: of metrics.json as the run left it, so that no run's file is taken for another's; None
    until it ended.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    run_id: str
    case: str
    started: str
    recipe: dict[str, Any]
    recipe_hash: str
    steps_done: int = 0
    metrics_sha256: str | None = None
    segments: list[int] = Field(default_factory=lambda: [1])
    batches: dict[str, str] = Field(default_factory=dict)
    dialect: str | None = None
    nonfinite: dict[str, list[int]] = Field(default_factory=dict)
    peak_rank: dict[str, int] = Field(default_factory=dict)
    data: dict[str, int] = Field(default_factory=dict)
    link: str = ""
    lora: dict[str, Any] | None = None
    fast_path: FastPath | None = None
    memory: Memory | None = None
    floor: FloorTerms | None = None
    invariants: list[Invariant] = Field(default_factory=list)
    environment: Environment | None = None
    health: dict[str, Any] = Field(default_factory=dict)
    ended: Ended | None = None

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read a record; raises OSError or pydantic.ValidationError."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def write(self, path: Path) -> None:
        """Replace `path` atomically, so that a reader never sees half a record."""
        write_json_atomically(path, self.model_dump(mode="json"))


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal; raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json_atomically(path: Path, value: Any) -> None:
    """Write JSON beside `path`, flush it to disk, then rename it over; NaN and Infinity are refused."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1, allow_nan=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


class RunDir:
    """Paths inside a run directory; creates nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.json"
        self.record = root / "run.json"
        self.checks = root / "checks.json"
        self.log = root / "run.log"
        self.invariants = root / "lora_invariants.json"
        self.trace = root / "profile" / "trace.json.gz"
        self.kernels = root / "profile" / "kernels.json"
        self.tensorboard = root / "tb"
        self.checkpoints = root / "ckpts"
