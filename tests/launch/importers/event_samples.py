# SPDX-License-Identifier: Apache-2.0
"""Event files as trainers leave them, with times of our choosing, written by tensorboard's own writer."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

Steps = Mapping[int, float]


class KeptOpen(io.BytesIO):
    """Bytes that can still be read after their writer has closed them."""

    def close(self) -> None:
        pass


def write_records(path: Path, *records: bytes) -> Path:
    """A file of records, as event files are."""
    kept = KeptOpen()
    writer = RecordWriter(kept)
    for record in records:
        writer.write(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kept.getvalue())
    return path


def write_events(path: Path, *events: Event) -> Path:
    """An event file with these events."""
    return write_records(path, *(event.SerializeToString() for event in events))


def version(at: float) -> Event:
    """The first event of every file."""
    return Event(wall_time=at, file_version="brain.Event:2")


def restart(at: float, step: int) -> Event:
    """The mark of a writer that purges: what follows goes on at this step."""
    return Event(wall_time=at, step=step, session_log=SessionLog(status=SessionLog.START))


def scalar(at: float, step: int, tag: str, value: float) -> Event:
    """A scalar as torch and tensorboardX write it."""
    return Event(wall_time=at, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def tensor(at: float, step: int, tag: str, content: object) -> Event:
    """A scalar, or anything else, as TensorFlow 2 writes it."""
    made = content if isinstance(content, TensorProto) else make_tensor_proto(content)
    return Event(wall_time=at, step=step, summary=Summary(value=[Summary.Value(tag=tag, tensor=made)]))


def write_run(path: Path, start: float, series: Mapping[str, Steps], *first: Event) -> Path:
    """A file of one run, which logs one step a second from its start on."""
    steps = sorted({step for values in series.values() for step in values})
    events = [
        scalar(start + 1 + place, step, tag, values[step])
        for place, step in enumerate(steps)
        for tag, values in series.items()
        if step in values
    ]
    return write_events(path, version(start), *first, *events)


def float32(value: float) -> float:
    """What is left of a number in an event file."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def numbers(dtype: str, *values: float) -> numpy.ndarray:
    """A tensor's content."""
    return numpy.array(values[0] if len(values) == 1 else values, dtype=dtype)
