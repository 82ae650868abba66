# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: a JSONL file, what the datasets library reads from a path, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset
from lora_suite.train.data.rows import Row, to_row

ALIASES = {"squad": "rajpurkar/squad", "tulu3_sft_mixture": "allenai/tulu-3-sft-mixture"}
"""Names that the field's recipes have for data sets of the hub."""

# The datasets library's own names of the formats of single files.
_FORMATS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


class Rows(Protocol):
    """The rows of a data set, by index from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def read_rows(dataset: Dataset, recipe_path: Path, key: str) -> Rows:
    """The rows of a data set; `key` is its place in the recipe (``data.train``), for messages.

    What is not a row is a ConfigError naming file and line: here for a JSONL file, when it is asked for in
    what the datasets library reads.
    """
    rows: Rows
    if dataset.data_path is None:
        rows = LoadedRows(
            _from_hub(dataset, key), dataset, f"{dataset.dataset_name} ({_split(dataset)})", key
        )
        source = f"{key}.dataset_name: {dataset.dataset_name}"
    else:
        found = _find(dataset.data_path, recipe_path, key)
        source = f"{key}.data_path: {dataset.data_path}"
        if found.suffix == ".jsonl":
            rows = list(_read_jsonl(found, dataset, key))
        else:
            rows = LoadedRows(_from_path(found, dataset, key), dataset, str(found), key)
    if not len(rows):
        raise ConfigError(f"{source} has no rows")
    return rows


class LoadedRows:
    """Rows of a data set of the datasets library, made when they are asked for."""

    def __init__(self, loaded: Any, dataset: Dataset, name: str, key: str) -> None:
        self._loaded = loaded
        self._dataset = dataset
        self._name = name
        self._key = key

    def __len__(self) -> int:
        return len(self._loaded)

    def __getitem__(self, index: int, /) -> Row:
        return to_row(self._loaded[index], self._dataset, f"{self._name} row {index}", self._key)


def _find(path: str, recipe_path: Path, key: str) -> Path:
    from lora_suite.config.paths import locate, search_folders

    found = locate(path, recipe_path)
    if found is None:
        folders = ", ".join(str(folder) for folder in search_folders(recipe_path))
        raise ConfigError(f"{key}.data_path: there is no file {path} (looked in {folders})")
    if found.is_file() and found.suffix != ".jsonl" and found.suffix not in _FORMATS:
        known = ", ".join((".jsonl", *_FORMATS))
        raise ConfigError(f"{key}.data_path: {path} is none of {known}, nor a folder")
    return found


def _read_jsonl(found: Path, dataset: Dataset, key: str) -> Iterator[Row]:
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
            yield to_row(value, dataset, place, key)


def _split(dataset: Dataset) -> str:
    return dataset.split or "train"


def _from_hub(dataset: Dataset, key: str) -> Any:
    """A split of a data set of the hub, or of the library's cache of it."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from httpx import HTTPError

    assert dataset.dataset_name is not None
    name = ALIASES.get(dataset.dataset_name, dataset.dataset_name)
    try:
        return load_dataset(name, split=_split(dataset))
    except (DatasetNotFoundError, OSError, ValueError, HTTPError) as error:
        raise ConfigError(
            f"{key}.dataset_name: cannot load {name} ({_split(dataset)}) ({_first_line(error)}); the hub "
            f"must be reachable or the data set be in its cache, or {key}.data_path name a copy: a JSONL, "
            f"JSON, CSV or Parquet file, a folder of such files, or what the datasets library saved to disk"
        ) from error


def _from_path(found: Path, dataset: Dataset, key: str) -> Any:
    """A split of a local data set: saved by ``save_to_disk``, a folder of data files, or one file."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    split = _split(dataset)
    try:
        if found.is_file():
            # One file is one split, whatever the recipe calls it.
            return load_dataset(_FORMATS[found.suffix], data_files=str(found), split="train")
        if not any((found / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return load_dataset(str(found), split=split)
        loaded = load_from_disk(str(found))
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise ConfigError(
            f"{key}.data_path: the datasets library does not read {found} ({_first_line(error)})"
        ) from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise ConfigError(
            f"{key}.split: {found} has no split {split!r}; it has {', '.join(map(str, loaded))}"
        )
    return loaded[split]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
