# SPDX-License-Identifier: Apache-2.0
"""Which format a source has, told by its content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.launch.importers import event_files, golden, jsonl, trainer_state
from lora_suite.launch.importers.source import json_of, text_of


def detect(source: Path, step_key: str | None = None) -> str:
    """One of FORMATS; ConfigError where the source looks like none."""
    if source.is_dir() or event_files.NAME_PART in source.name:
        return "tensorboard"
    text = text_of(source)
    first, _, rest = text.lstrip().partition("\n")
    if rest.strip() and first.startswith("{") and first.rstrip().endswith("}"):
        return "jsonl"
    document = json_of(str(source), text)
    if isinstance(document, dict):
        return _of_object(source, document, step_key)
    raise _unknown(source)


def _of_object(source: Path, document: dict[str, Any], step_key: str | None) -> str:
    if trainer_state.HISTORY in document:
        return "trainer-state"
    if golden.looks_golden(document):
        return "megatron-golden"
    if {*jsonl.STEP_KEYS, step_key} & jsonl.flat(document).keys():
        return "jsonl"
    if document and all(isinstance(steps, dict) for steps in document.values()):
        raise ConfigError(
            f"{source} is no other trainer's format; check_metrics reads {{metric: {{step: value}}}} as it is"
        )
    raise _unknown(source)


def _unknown(source: Path) -> ConfigError:
    return ConfigError(f"{source} looks like no known format; give --format, or name another source")
