# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files: the scalars of a folder and all folders in it.

A file is a sequence of records, each with its length and two checksums
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). tensorboard's own loader
stops silently at the first damaged one, so records are read here, and its protocol buffers and checksum used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.launch.importers.runs import Log, Run, Value, refuse_conflicts

NAME_PART = "tfevents"
_SIDE_BY_SIDE = "they were written at the same time, so import one of them alone"
_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
# Seconds since 1970, some 30,000 years from now: a time beyond it is none.
_LATEST = 1e12
_NUMERIC = ("DT_FLOAT", "DT_DOUBLE", "DT_HALF", "DT_INT32", "DT_INT64")


def read(source: Path, strict: bool) -> Log:
    """The scalars of one event file, or of every one in a folder, by runs of the training.

    A run is what was written in one stretch of time: files that overlap in time were written side by side and
    must agree (ConfigError). The time is that of the events, never of the file, which copying changes.
    """
    paths = _paths(source)
    warnings: list[str] = []
    parts = [part for path in paths for part in _parts(path, strict, warnings) if part.values]
    runs: list[Run] = []
    for part in sorted(parts, key=lambda part: (part.start, part.where)):
        if runs and part.start < runs[-1].end:
            _add(runs[-1], part)
        else:
            runs.append(part)
    return Log(runs, warnings)


def _paths(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = sorted(path for path in source.rglob(f"*{NAME_PART}*") if path.is_file())
    if not found:
        raise ConfigError(
            f"{source}: no event files (*{NAME_PART}*) in this folder; name the folder that holds them"
        )
    return found


def _add(run: Run, part: Run) -> None:
    """Take what another file of the same run holds."""
    run.end = max(run.end, part.end)
    if run.resumed_at is None:
        run.resumed_at = part.resumed_at
    refuse_conflicts(run.values, part.values, _SIDE_BY_SIDE)
    for metric, steps in part.values.items():
        run.values.setdefault(metric, {}).update(steps)


def _parts(path: Path, strict: bool, warnings: list[str]) -> list[Run]:
    """What one file holds, cut where a session of the training starts anew."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    parts: list[Run] = []
    for offset, record in _records(path, warnings):
        try:
            event = Event.FromString(record)
        except DecodeError:
            raise _damaged(path, offset, "holds no event") from None
        if not 0 <= event.wall_time < _LATEST:
            raise _damaged(path, offset, f"has the time {event.wall_time}")
        restarts = event.HasField("session_log") and event.session_log.status == SessionLog.START
        if restarts or not parts:
            resumed_at = event.step if restarts else None
            parts.append(Run(where=str(path), start=event.wall_time, resumed_at=resumed_at))
        parts[-1].end = max(parts[-1].end, event.wall_time)
        for value in event.summary.value:
            try:
                number = _scalar(value)
            except ValueError:
                raise _damaged(path, offset, f"has no readable value of {value.tag!r}") from None
            if number is not None:
                parts[-1].put(value.tag, event.step, Value(number, str(path)), strict)
    return parts


def _scalar(value: Any) -> float | None:
    """The number of a summary value, old style or tensor; None for histograms, texts, images."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.compat.proto import types_pb2
    from tensorboard.util.tensor_util import make_ndarray

    dtype = types_pb2.DataType.Name(value.tensor.dtype)
    return float(make_ndarray(value.tensor)) if dtype in _NUMERIC else None


def _records(path: Path, warnings: list[str]) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every record; one that the end of the file cuts off is a warning."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name an event file or a folder of them") from None
    offset = 0
    while offset < len(data):
        body = offset + _HEAD.size
        if body <= len(data):
            length, checksum = _HEAD.unpack_from(data, offset)
            if masked_crc32c(data[offset : offset + 8]) != checksum:
                raise _damaged(path, offset, "has a wrong length")
        if body > len(data) or body + length + _CHECKSUM.size > len(data):
            warnings.append(f"{path}: the last record is cut off and is left out; was the run killed?")
            return
        record = data[body : body + length]
        if masked_crc32c(record) != _CHECKSUM.unpack_from(data, body + length)[0]:
            raise _damaged(path, offset, "has a wrong checksum")
        yield offset, record
        offset = body + length + _CHECKSUM.size


def _damaged(path: Path, offset: int, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: damaged, the record at byte {offset} {what}; copy it again or take it out of the folder"
    )
