# SPDX-License-Identifier: Apache-2.0
"""What a training's time went into, by kernel and operator: read from a trace of torch's profiler.

The trace is the Chrome trace format that `torch.profiler.profile.export_chrome_trace` writes, plain or
gzipped, by whichever trainer: complete events (``"ph": "X"``) with `cat`, `name`, `ts` and `dur` in µs.
Times on the device are those of its kernels, copies and fills. A kernel is launched by a call on the host
with which it shares a correlation id; that call tells the phase of the step it belongs to, where the trainer
has put phases into its trace (ours does, as ranges named `phase/…`).
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_suite.config.errors import ConfigError
from lora_suite.launch.record import write_json_atomically

PHASE_RANGE = "phase/"
"""How the names of the ranges begin that are phases of a step."""
STEP_RANGE = "ProfilerStep#"
"""How torch's profiler names a step, where the trainer tells it of steps."""

# Categories by the words of all releases of the profiler (older ones have capitals and other words).
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver"})
_OPERATORS = frozenset({"cpu_op", "operator"})
_GZIP = b"\x1f\x8b"

Kind = Literal["kernel", "operator"]


class Timed(BaseModel):
    """All calls of one kernel (or operator) in one phase, over all steps of a profile.

    kind: `kernel` is anything that ran on the device, `operator` what the host did. device_us: time on the
    device. host_us: of a kernel, the calls that launched it; of an operator, its own time without the
    operators it called. phase: of the step, "" where the trace does not say.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    name: str
    phase: str
    count: int
    device_us: float
    host_us: float


class Profile(BaseModel):
    """What was timed in `steps` steps of one rank; 0 steps where the trace has no marks of steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int
    timed: list[Timed]

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read the kernels.json that `write` wrote; raises ConfigError."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a profile of lora-suite; profile the run again") from error

    def write(self, path: Path) -> None:
        """Write it as JSON, replacing the file."""
        write_json_atomically(path, self.model_dump(mode="json"))


def read_trace(path: Path) -> Profile:
    """Read a trace of torch's profiler, plain or gzipped; raises ConfigError where it is not one."""
    events = [event for event in _events(path) if event.get("ph") == "X" and "dur" in event]
    if not any(_category(event) in _ON_DEVICE | _OPERATORS for event in events):
        raise ConfigError(
            f"{path}: no kernel and no operator in it; is it a Chrome trace of torch.profiler "
            "(prof.export_chrome_trace)?"
        )
    phases = _Phases(events)
    rows: dict[tuple[Kind, str, str], list[float]] = {}
    for kind, event, phase, device_us, host_us in (*_kernels(events, phases), *_operators(events, phases)):
        row = rows.setdefault((kind, str(event["name"]), phase), [0, 0.0, 0.0])
        row[0] += 1
        row[1] += device_us
        row[2] += host_us
    timed = [
        Timed(kind=kind, name=name, phase=phase, count=int(count), device_us=device_us, host_us=host_us)
        for (kind, name, phase), (count, device_us, host_us) in rows.items()
    ]
    timed.sort(key=lambda row: (-row.device_us, -row.host_us, row.name, row.phase))
    steps = {event["name"] for event in events if str(event["name"]).startswith(STEP_RANGE)}
    return Profile(steps=len(steps), timed=timed)


# An event with its kind, phase, and µs on the device and on the host.
_Measured = tuple[Kind, Mapping[str, Any], str, float, float]


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        trace = json.loads(content)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read as a trace of torch's profiler: {reason}") from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ConfigError(f"{path}: no traceEvents in it; is it a Chrome trace of torch.profiler?")
    return [event for event in events if isinstance(event, dict)]


class _Phases:
    """The ranges of phases on the host's clock, to ask for the phase of a moment."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        # The device's own copies of the ranges (gpu_user_annotation) lie where its work is, not where it was
        # asked for.
        found = sorted(
            (float(event["ts"]), float(event["dur"]), str(event["name"])[len(PHASE_RANGE) :])
            for event in events
            if str(event["name"]).startswith(PHASE_RANGE) and not _category(event).startswith("gpu")
        )
        self._starts = [start for start, _, _ in found]
        self._found = found

    def at(self, moment: float) -> str:
        """Name of the phase that holds the moment, "" for none."""
        index = bisect_right(self._starts, moment) - 1
        if index < 0:
            return ""
        start, length, name = self._found[index]
        return name if moment <= start + length else ""


def _kernels(events: Sequence[Mapping[str, Any]], phases: _Phases) -> Iterator[_Measured]:
    """What ran on the device. A graph's kernels share one call, whose time counts once, for the first."""
    calls = {_correlation(event): event for event in events if _category(event) in _CALLS}
    seen: set[object] = set()
    for event in events:
        if _category(event) not in _ON_DEVICE:
            continue
        correlation = _correlation(event)
        call = calls.get(correlation) if correlation is not None else None
        host_us = float(call["dur"]) if call is not None and correlation not in seen else 0.0
        seen.add(correlation)
        asked_at = float(call["ts"]) if call is not None else float(event["ts"])
        yield "kernel", event, phases.at(asked_at), float(event["dur"]), host_us


def _operators(events: Sequence[Mapping[str, Any]], phases: _Phases) -> Iterator[_Measured]:
    """What the host did, each operator less those that it called."""
    threads: dict[object, list[Mapping[str, Any]]] = {}
    for event in events:
        if _category(event) in _OPERATORS:
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        own = [float(event["dur"]) for event in thread]
        open_: list[int] = []
        for index, event in enumerate(thread):
            while open_ and float(event["ts"]) >= _end(thread[open_[-1]]):
                open_.pop()
            if open_:
                own[open_[-1]] -= float(event["dur"])
            open_.append(index)
        for event, microseconds in zip(thread, own, strict=True):
            yield "operator", event, phases.at(float(event["ts"])), 0.0, max(microseconds, 0.0)


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _category(event: Mapping[str, Any]) -> str:
    return str(event.get("cat", "")).lower()


def _correlation(event: Mapping[str, Any]) -> object:
    arguments = event.get("args")
    return arguments.get("correlation") if isinstance(arguments, dict) else None
