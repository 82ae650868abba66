# SPDX-License-Identifier: Apache-2.0
"""Reads metrics and run descriptions from files, standard input and jq.

`{metric: {step: value}}` is read whole by the json module and turned into Series metric by metric, when a
check asks for one, so that a large file costs little more than its parsing.
"""

import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from check_metrics.errors import MetricsError
from check_metrics.series import Series

STDIN = Path("-")
_JQ_SECONDS = 60
_MAX_STEP = 10**15
_SHAPE = 'the shape is {"metric": {"step": value}}'


class Metrics(Mapping[str, Series]):
    """The series of one document, converted on first use; MetricsError where a series is malformed."""

    def __init__(self, source: str, document: dict[str, Any]) -> None:
        self._source = source
        self._raw = document
        self._series: dict[str, Series] = {}

    def __getitem__(self, name: str) -> Series:
        series = self._series.get(name)
        if series is None:
            series = self._converted(name, self._raw[name])
            self._series[name] = series
            # The text keys are not needed again; only the name stays, for the iteration.
            self._raw[name] = None
        return series

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def _converted(self, name: str, raw: Any) -> Series:
        where = f'{self._source}: "{name}"'
        if not isinstance(raw, dict):
            raise MetricsError(f"{where} is no object of steps; {_SHAPE}")
        steps = _steps(where, raw)
        values = _values(where, raw)
        order = steps if _ascending(steps) else sorted(steps)
        if order is not steps:
            by_step = dict(zip(steps, values, strict=True))
            values = [by_step[step] for step in order]
        if not _ascending(order):
            raise MetricsError(
                f"{where} has two values for one step; write each step once, without leading zeros"
            )
        return Series(name, self._shared(order), tuple(values))

    def _shared(self, steps: list[int]) -> tuple[int, ...]:
        """One tuple for all series with equal steps, which most of a run's series are."""
        latest = next(reversed(self._series.values()), None)
        made = tuple(steps)
        return latest.steps if latest is not None and latest.steps == made else made


def load_metrics(path: Path) -> dict[str, Series]:
    """Every series of a metrics file, checked; MetricsError names file, metric and remedy."""
    return dict(open_metrics(path))


def open_metrics(path: Path, jq_filter: str | None = None) -> Metrics:
    """The series of a file (`-`: standard input), passed through jq first if a filter is given.

    An empty file, and a filter that gives nothing, is a document without metrics.
    """
    source = "standard input" if path == STDIN else str(path)
    text = read_text(path, "a metrics file")
    if jq_filter is not None:
        text = _through_jq(source, text, jq_filter)
        source = f"{source} through jq {jq_filter!r}"
    document = parse_json(source, text) if text.strip() else {}
    if not isinstance(document, dict):
        raise MetricsError(f"{source}: no JSON object at the top; {_SHAPE}")
    return Metrics(source, document)


def run_segments(path: Path) -> tuple[int, ...]:
    """`segments` of a run.json: the first step of the run and of each resume; empty where it names none."""
    document = parse_json(str(path), read_text(path, "a run.json"))
    if not isinstance(document, dict):
        raise MetricsError(f"{path}: no JSON object at the top; name the run's own run.json with --run-json")
    segments = document.get("segments", [])
    if not (isinstance(segments, list) and all(type(step) is int and step >= 1 for step in segments)):
        raise MetricsError(
            f"{path}: segments must be a list of steps, [1, 31]; write it so or give --segments"
        )
    return tuple(sorted(set(segments)))


def parse_json(source: str, text: str, **options: Any) -> Any:
    """The JSON value of a text; MetricsError where it is none, and where an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique, **options)
    except json.JSONDecodeError as error:
        raise MetricsError(f"{source}: not JSON ({error}); write the file again") from None
    except (ValueError, RecursionError) as error:
        raise MetricsError(f"{source}: not usable as JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object; keep one of them")
    return made


def read_text(path: Path, kind: str) -> str:
    """Text of a file (`-`: standard input); MetricsError says which kind of file should have been there."""
    try:
        if path == STDIN:
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror}; name {kind} that is there and readable") from None
    except ValueError as error:
        raise MetricsError(f"{path}: not UTF-8 text ({error}); name {kind}") from None


def _through_jq(source: str, text: str, jq_filter: str) -> str:
    program = shutil.which("jq")
    if program is None:
        raise MetricsError("jq is not installed, and --jq needs it; install jq or leave the option out")
    try:
        # The blank keeps a filter such as `-1` from being read as an option.
        done = subprocess.run(
            [program, "-c", " " + jq_filter],
            input=_for_jq(source, text).encode(),
            capture_output=True,
            timeout=_JQ_SECONDS,
            check=False,
        )
    except (OSError, ValueError) as error:
        raise MetricsError(f"jq could not be started with the filter {jq_filter!r}: {error}") from None
    except subprocess.TimeoutExpired:
        raise MetricsError(f"jq took more than {_JQ_SECONDS} s on {source}; does the filter end?") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise MetricsError(f"jq failed on {source} with the filter {jq_filter!r}: {said}")
    printed = done.stdout.decode(errors="replace").splitlines()
    if len(printed) > 1:
        raise MetricsError(f"the filter {jq_filter!r} gives {len(printed)} values of {source}; {_SHAPE}")
    return "".join(printed).removeprefix("null")


def _for_jq(source: str, text: str) -> str:
    """The document with null for what is not finite: jq 1.6 makes a finite 1.797e308 of Infinity."""
    if not text.strip():
        return "{}"
    return json.dumps(parse_json(source, text, parse_constant=lambda _: None, parse_float=_finite_or_none))


def _finite_or_none(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _steps(where: str, raw: dict[str, Any]) -> list[int]:
    digits = "".join(raw)
    if "" in raw or (digits and not (digits.isascii() and digits.isdigit())):
        odd = next(key for key in raw if not (key.isascii() and key.isdigit()))
        raise MetricsError(f"{where}: step {odd!r} is no whole number; {_SHAPE}")
    try:
        steps = list(map(int, raw))
    except ValueError:
        steps = [_MAX_STEP + 1]
    if steps and max(steps) > _MAX_STEP:
        raise MetricsError(f"{where}: a step is larger than {_MAX_STEP}; {_SHAPE}")
    return steps


def _values(where: str, raw: dict[str, Any]) -> list[float]:
    if {*map(type, raw.values())} <= {float, int}:
        with contextlib.suppress(OverflowError):
            return list(map(float, raw.values()))
    return [_value(where, step, value) for step, value in raw.items()]


def _value(where: str, step: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except ValueError:
            pass
    raise MetricsError(
        f"{where}: the value at step {step} is no number but {value!r}; write a number or null"
    )


def _ascending(steps: list[int]) -> bool:
    return all(map(int.__lt__, steps, steps[1:]))
