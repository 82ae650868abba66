# SPDX-License-Identifier: Apache-2.0
"""`trainer_state.json` of transformers' Trainer: the entries of its `log_history`.

Names are translated by a fixed table (docs/importers.md): `loss` is `train/loss`, `eval_loss` is
`validation/loss`, what the last entry sums up is under `summary/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_suite.config.errors import ConfigError
from lora_suite.launch.importers.runs import Log, Run, Value
from lora_suite.launch.importers.source import Numbers, json_of, text_of

HISTORY = "log_history"
STEP = "step"
SUMMARY_MARK = "train_runtime"
EVALUATION = "eval_"
RENAMED = {"learning_rate": "lr"}


def read(path: Path, strict: bool) -> Log:
    """The history of one file; ConfigError where it has none, or an entry without a step."""
    document = json_of(str(path), text_of(path))
    history = document.get(HISTORY) if isinstance(document, dict) else None
    if not isinstance(history, list):
        raise ConfigError(f"{path}: no list {HISTORY}; name the trainer_state.json of a checkpoint")
    numbers = Numbers()
    run = Run(where=str(path))
    for place, entry in enumerate(history):
        where = f"{path}: {HISTORY}[{place}]"
        if not isinstance(entry, dict) or type(entry.get(STEP)) is not int:
            raise ConfigError(
                f"{where} has no whole number under {STEP!r}; is the file what the Trainer wrote?"
            )
        for metric, value in _metrics(entry):
            if (meant := numbers.of(metric, value)) is not None:
                run.put(metric, entry[STEP], Value(meant, where), strict)
    return Log([run], numbers.warnings())


def _metrics(entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names in our words, and values, of one entry: of training, of an evaluation, or the summary."""
    evaluation = any(key.startswith(EVALUATION) for key in entry)
    for key, value in entry.items():
        if key == STEP:
            continue
        if SUMMARY_MARK in entry:
            yield f"summary/{key}", value
        elif key.startswith(EVALUATION):
            yield f"validation/{key.removeprefix(EVALUATION)}", value
        elif not evaluation:
            yield f"train/{RENAMED.get(key, key)}", value
