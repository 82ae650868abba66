# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set: pairs of prompt and response, from a local JSONL file or from the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset


@dataclass(frozen=True)
class Row:
    """One training example in text. The prompt carries no loss, the response does."""

    prompt: str
    response: str


class Rows(Protocol):
    """The rows of a data set, by index from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def read_rows(dataset: Dataset, recipe_path: Path, key: str) -> Rows:
    """The rows of a data set; `key` is its place in the recipe (``data.train``), for messages.

    A row that is not a prompt and a response is a ConfigError naming file and line: here for a file, when it
    is asked for in a data set of the hub.
    """
    rows: Rows
    if dataset.data_path is not None:
        rows = list(_read_jsonl(dataset.data_path, dataset, recipe_path, key))
        source = f"{key}.data_path: {dataset.data_path}"
    else:
        rows = HubRows(dataset, key)
        source = f"{key}.dataset_name: {dataset.dataset_name}"
    if not rows:
        raise ConfigError(f"{source} has no rows")
    return rows


def _read_jsonl(path: str, dataset: Dataset, recipe_path: Path, key: str) -> Iterator[Row]:
    from lora_suite.config.paths import locate, search_folders

    found = locate(path, recipe_path)
    if found is None or not found.is_file():
        folders = ", ".join(str(folder) for folder in search_folders(recipe_path))
        raise ConfigError(f"{key}.data_path: there is no file {path} (looked in {folders})")
    with found.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{found}:{number}"
            try:
                text = line.decode("utf-8").strip()
                if not text:
                    continue
                value = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{place}: not a line of JSON in UTF-8 ({error})") from error
            yield _to_row(value, dataset, place, key)


class HubRows:
    """The rows of a data set of the hub, read when they are asked for."""

    def __init__(self, dataset: Dataset, key: str) -> None:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError

        self._dataset = dataset
        self._key = key
        self._name = f"{dataset.dataset_name} ({dataset.split or 'train'})"
        try:
            self._loaded: Any = load_dataset(dataset.dataset_name, split=dataset.split or "train")
        except (DatasetNotFoundError, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"{key}.dataset_name: cannot load {self._name} ({reason}); "
                f"a JSONL file goes into {key}.data_path"
            ) from error

    def __len__(self) -> int:
        return len(self._loaded)

    def __getitem__(self, index: int, /) -> Row:
        return _to_row(self._loaded[index], self._dataset, f"{self._name} row {index}", self._key)


def _to_row(value: Any, dataset: Dataset, place: str, key: str) -> Row:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: a row is an object with the keys {_wanted(dataset)}, not {value!r:.60}")
    texts = []
    for setting, name in (("input_key", dataset.input_key), ("output_key", dataset.output_key)):
        if name not in value:
            has = ", ".join(sorted(map(str, value))) or "no keys"
            chat = "; rows of chat messages are not read" if "messages" in value else ""
            raise ConfigError(f"{place}: no key {name!r} ({key}.{setting}); the row has {has}{chat}")
        if not isinstance(value[name], str):
            raise ConfigError(f"{place}: {name!r} ({key}.{setting}) must be text, not {value[name]!r:.60}")
        texts.append(value[name])
    return Row(prompt=texts[0], response=texts[1])


def _wanted(dataset: Dataset) -> str:
    return f"{dataset.input_key!r} and {dataset.output_key!r}"
