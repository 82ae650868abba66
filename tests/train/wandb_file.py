# SPDX-License-Identifier: Apache-2.0
"""Reads what wandb wrote offline: a file of protobuf records in the format of LevelDB's logs.

wandb itself has no reader of it in Python any more. The format: blocks of 32 KiB, the first of which begins
with a header of 7 bytes; in them chunks of checksum (4 bytes), length (2), type (1: whole, 2: first, 3:
middle, 4: last part of a record) and content; a rest of a block too short for a chunk's head is padding
(https://github.com/google/leveldb/blob/main/doc/log_format.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _HEAD = 32768, 7, 7


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, whole = _HEADER, b""
    while at + _HEAD <= len(content):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + _HEAD])
        whole += content[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(path: Path) -> dict[str, dict[str, float]]:
    """The history of a .wandb file in the shape of metrics.json."""
    series: dict[str, dict[str, float]] = {}
    for record in records(path):
        if record.WhichOneof("record_type") != "history":
            continue
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        # wandb adds the last value of `step` to rows that have none.
        step = items.get("seconds", items.get("step"))
        for name, value in items.items():
            if not name.startswith("_") and name not in ("step", "seconds"):
                series.setdefault(name, {})[str(step)] = value
    return series


def run_of(path: Path) -> Any:
    """The record that describes the run."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
