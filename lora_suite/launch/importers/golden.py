# SPDX-License-Identifier: Apache-2.0
"""Golden values of Megatron-LM's functional tests.

`{metric: {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 10.9, "5": "nan"}}}`; see
https://github.com/NVIDIA/Megatron-LM/tree/main/tests/functional_tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.launch.importers.runs import Log, Run, Value
from lora_suite.launch.importers.source import json_of, number, text_of

VALUES = "values"


def read(path: Path) -> Log:
    """The golden values of one file; `"nan"` and `"inf"` are not finite.

    ConfigError where a value is no number or lies outside of the steps that the file declares.
    """
    document = json_of(str(path), text_of(path))
    if not looks_golden(document):
        raise ConfigError(
            f'{path}: no golden values; their shape is {{"metric": {{"values": {{"1": 10.9}}}}}}'
        )
    run = Run(where=str(path))
    for metric, entry in document.items():
        where = f"{path}: {metric!r}"
        if not isinstance(entry[VALUES], dict):
            raise ConfigError(
                f'{where}: "{VALUES}" does not name its steps; write it as {{"1": 10.9, "5": 9.7}}'
            )
        for step, value in entry[VALUES].items():
            run.put(metric, _step(where, entry, step), Value(_number(where, step, value), where), strict=True)
    return Log([run], [])


def looks_golden(document: Any) -> bool:
    """Whether a JSON value has the shape of golden values."""
    return (
        isinstance(document, dict)
        and bool(document)
        and all(isinstance(entry, dict) and VALUES in entry for entry in document.values())
    )


def _step(where: str, entry: dict[str, Any], text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ConfigError(f"{where}: step {text!r} is no whole number")
    step = int(text)
    first, last = entry.get("start_step", step), entry.get("end_step", step)
    if not (type(first) is int and type(last) is int and first <= step <= last):
        raise ConfigError(f"{where}: step {step} is not in {first} to {last}, which the file declares")
    return step


def _number(where: str, step: str, value: Any) -> float:
    meant = number(value)
    if meant is None:
        raise ConfigError(f"{where}: the value at step {step} is no number but {value!r}")
    return meant
