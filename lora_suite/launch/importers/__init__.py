# SPDX-License-Identifier: Apache-2.0
"""Metrics of other trainers, brought into the common shape `{metric: {step: value}}`.

Each format is one module, and `runs` joins what several runs of one training left; docs/importers.md has the
rules.
"""

from __future__ import annotations

from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.launch.importers.runs import Imported, Log, join
from lora_suite.launch.record import write_json_atomically

FORMATS = ("tensorboard", "megatron-golden", "jsonl", "trainer-state")
AUTO = "auto"

__all__ = ["FORMATS", "Imported", "import_metrics", "import_to_file"]


def import_metrics(
    source: Path, format: str = AUTO, strict: bool = False, step_key: str | None = None
) -> Imported:
    """Read the metrics of a folder of event files, or of a file in one of FORMATS.

    format: one of FORMATS, or "auto" to tell by the content.
    strict: refuse two different values for one step, instead of taking the later run's.
    step_key: where a JSONL line has its step, if not under a usual name.
    Raises ConfigError where the source is unreadable, damaged or holds no number; it names file and remedy.
    """
    if format == AUTO:
        from lora_suite.launch.importers.detect import detect

        format = detect(source, step_key)
    if step_key is not None and format != "jsonl":
        raise ConfigError(f"--step-key names the step of a JSONL line, but {source} is read as {format}")
    log = _read(source, format, strict, step_key)
    imported = join(log, strict)
    if not imported.metrics:
        raise ConfigError(f"{source}: no number to import, read as {format}; name another source or --format")
    return imported


def import_to_file(
    source: Path, output: Path, format: str = AUTO, strict: bool = False, step_key: str | None = None
) -> Imported:
    """Import and write `output`, atomically and over what is there; nothing is written on an error."""
    if source.resolve() == output.resolve():
        raise ConfigError(f"{output} is the source itself; give -o another name")
    imported = import_metrics(source, format, strict, step_key)
    try:
        write_json_atomically(output, imported.metrics)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written ({error.strerror}); name a folder that is there"
        ) from None
    return imported


def _read(source: Path, format: str, strict: bool, step_key: str | None) -> Log:
    match format:
        case "tensorboard":
            from lora_suite.launch.importers import event_files

            return event_files.read(source, strict)
        case "megatron-golden":
            from lora_suite.launch.importers import golden

            return golden.read(source)
        case "jsonl":
            from lora_suite.launch.importers import jsonl

            return jsonl.read(source, strict, step_key)
        case "trainer-state":
            from lora_suite.launch.importers import trainer_state

            return trainer_state.read(source, strict)
    raise ConfigError(f"no format {format!r}; there are {', '.join((AUTO, *FORMATS))}")
