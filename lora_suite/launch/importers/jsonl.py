# SPDX-License-Identifier: Apache-2.0
"""Logs of one JSON object a line, each with the step that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.launch.importers.runs import Log, Run, Value
from lora_suite.launch.importers.source import Numbers, json_of, text_of

STEP_KEYS = ("step", "iteration", "global_step")


def read(path: Path, strict: bool, step_key: str | None = None) -> Log:
    """The numbers of every line that has a step; nested objects are joined with a slash.

    A metric whose steps go back starts a new run: the training was resumed and went on in the same file.
    ConfigError names the line that is no object, or whose step is none.
    """
    warnings: list[str] = []
    lines = list(_objects(path, warnings))
    key = step_key or _step_key(path, lines)
    numbers = Numbers()
    runs = [Run(where=str(path))]
    reached: dict[str, int] = {}
    without_step = 0
    for place, found in lines:
        if key not in found:
            without_step += 1
            continue
        where = f"{path}:{place}"
        step = _step(where, key, found.pop(key))
        values = {name: meant for name, v in found.items() if (meant := numbers.of(name, v)) is not None}
        if any(step < reached.get(name, step) for name in values):
            runs.append(Run(where=where))
            reached = {}
        for name, value in values.items():
            runs[-1].put(name, step, Value(value, where), strict)
            reached[name] = step
    if without_step:
        warnings.append(f"{path}: {without_step} lines have no {key!r} and are left out")
    return Log(runs, warnings + numbers.warnings())


def flat(document: dict[str, Any]) -> dict[str, Any]:
    """The leaves of nested objects under names joined with a slash."""
    made: dict[str, Any] = {}
    pending = list(document.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{name}/{inner}", leaf) for inner, leaf in value.items()]
        else:
            made[name] = value
    return made


def _objects(path: Path, warnings: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and flattened object of every line; a last line that was cut off is a warning."""
    text = text_of(path)
    lines = text.split("\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{place}"
        try:
            found = json_of(where, line)
        except ConfigError:
            if place < len(lines):
                raise
            warnings.append(f"{where}: the last line is cut off and is left out")
            return
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: no JSON object; each line must be one, with its step")
        yield place, flat(found)


def _step_key(path: Path, lines: list[tuple[int, dict[str, Any]]]) -> str:
    for _, found in lines:
        for key in STEP_KEYS:
            if key in found:
                return key
    raise ConfigError(f"{path}: no line has a step ({', '.join(STEP_KEYS)}); name its key with --step-key")


def _step(where: str, key: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise ConfigError(
            f"{where}: {key!r} is {value!r}, not a whole number; name the step's key with --step-key"
        )
    return value
