# SPDX-License-Identifier: Apache-2.0
"""Rows are read from JSONL, from what the datasets library reads, from the hub; and what errors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset
from lora_suite.train.data.rows import Message, Row
from lora_suite.train.data.sources import read_rows

PAIRS = [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]
EXPECTED = [Row.of_pair("a", "b"), Row.of_pair("c", "d")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, from which relative paths count; the library's cache is beside it."""
    (tmp_path / "recipe.yaml").write_text("{}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def read(folder: Path, path: str, **settings: Any) -> list[Row]:
    rows = read_rows(Dataset(data_path=path, **settings), folder / "recipe.yaml", "data.train")
    return [rows[index] for index in range(len(rows))]


def read_text(folder: Path, text: str | bytes) -> list[Row]:
    (folder / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(folder, "rows.jsonl")


def test_lines_are_read_in_order_and_blank_ones_skipped(folder: Path) -> None:
    text = '{"input": "1+1=", "output": "2", "more": 0}\n\n{"input": "", "output": "\\u00e9"}'
    assert read_text(folder, text) == [Row.of_pair("1+1=", "2"), Row.of_pair("", "é")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"', r"rows\.jsonl:3: not a line of JSON"),
        (b'{"input": "\xff"}', r"rows\.jsonl:3: not a line of JSON in UTF-8"),
        ('{"messages": []}', r"rows\.jsonl:3: 'messages' is empty"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(folder: Path, line: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_text(
            folder,
            b'{"input": "a", "output": "b"}\n\n' + (line if isinstance(line, bytes) else line.encode()),
        )


def test_a_missing_or_empty_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.data_path: rows\.jsonl has no rows"):
        read_text(folder, "\n")
    with pytest.raises(ConfigError, match=r"data\.train\.data_path: there is no file other\.jsonl"):
        read(folder, "other.jsonl")
    (folder / "rows.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"rows\.txt is none of \.jsonl, \.json, .* nor a folder"):
        read(folder, "rows.txt")


def save(folder: Path, form: str) -> str:
    """Write the pairs in one form below the folder; return the path's name."""
    rows = datasets.Dataset.from_list(PAIRS)
    if form == "file.parquet":
        rows.to_parquet(folder / form)
    elif form == "file.csv":
        rows.to_csv(folder / form)
    elif form == "file.json":
        (folder / form).write_text(json.dumps(PAIRS))
    elif form == "folder of parquet":
        (folder / form).mkdir()
        rows.to_parquet(folder / form / "train-00000-of-00001.parquet")
    elif form == "saved":
        rows.save_to_disk(folder / form)
    else:
        datasets.DatasetDict({"train": rows}).save_to_disk(folder / form)
    return form


@pytest.mark.parametrize(
    "form", ["file.parquet", "file.csv", "file.json", "folder of parquet", "saved", "saved with splits"]
)
def test_local_copies_are_read_without_network(folder: Path, form: str) -> None:
    assert read(folder, save(folder, form)) == EXPECTED


def test_a_split_of_a_saved_data_set(folder: Path) -> None:
    parts = {"train": PAIRS[:1], "validation": PAIRS[1:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    saved.save_to_disk(folder / "both")
    assert read(folder, "both", split="validation") == EXPECTED[1:]
    with pytest.raises(
        ConfigError, match=r"data\.train\.split: .*both has no split 'test'; it has train, val"
    ):
        read(folder, "both", split="test")


def test_a_folder_without_data_is_one_clear_error(folder: Path) -> None:
    (folder / "none").mkdir()
    with pytest.raises(
        ConfigError, match=r"data\.train\.data_path: the datasets library does not read .*none"
    ):
        read(folder, "none")


def test_a_bad_row_of_a_local_copy_is_named_by_its_index(folder: Path) -> None:
    datasets.Dataset.from_list([*PAIRS, {"input": "e", "output": ""}]).save_to_disk(folder / "bad")
    rows = read_rows(Dataset(data_path="bad"), folder / "recipe.yaml", "data.train")
    assert rows[0] == EXPECTED[0]
    with pytest.raises(ConfigError, match=r"bad row 2: the response is empty"):
        rows[2]


TEXT = datasets.Value("string")
SQUAD = datasets.Features(
    {
        "id": TEXT,
        "title": TEXT,
        "context": TEXT,
        "question": TEXT,
        "answers": datasets.Sequence({"text": TEXT, "answer_start": datasets.Value("int32")}),
    }
)
TULU = datasets.Features({"id": TEXT, "messages": [{"content": TEXT, "role": TEXT}], "source": TEXT})


def test_local_copies_of_squad_and_the_tulu_3_mixture(folder: Path) -> None:
    """Rows of the schemas on the data sets' cards, through Parquet and through the library's own format."""
    question = {
        "id": "1",
        "title": "t",
        "context": "The bridge was built in 1901.",
        "question": "When?",
        "answers": {"text": ["1901", "in 1901"], "answer_start": [24, 21]},
    }
    chat = {
        "id": "2",
        "messages": [{"content": "hi", "role": "user"}, {"content": "ho", "role": "assistant"}],
        "source": "s",
    }
    asked = datasets.Dataset.from_list([question], features=SQUAD)
    talked = datasets.Dataset.from_list([chat], features=TULU)
    for rows, name in ((asked, "squad"), (talked, "tulu")):
        rows.to_parquet(folder / f"{name}.parquet")
        rows.save_to_disk(folder / name)
    turns = ("system", "The bridge was built in 1901."), ("user", "When?"), ("assistant", "1901")
    for path in ("squad.parquet", "squad"):
        assert read(folder, path) == [Row(tuple(Message(*turn) for turn in turns))]
    for path in ("tulu.parquet", "tulu"):
        assert read(folder, path) == [Row.of_pair("hi", "ho")]


class Hub:
    """Stands for the hub: remembers what was asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.asked: list[tuple[str, str]] = []

    def load(self, name: str, split: str) -> datasets.Dataset:
        self.asked.append((name, split))
        return datasets.Dataset.from_list(self.rows)


def test_rows_of_the_hub_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    hub = Hub([*PAIRS, {"input": "c", "output": None}])
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    rows = read_rows(Dataset(dataset_name="some/set", split="test"), folder / "r.yaml", "data.train")
    assert (len(rows), rows[0], hub.asked) == (3, EXPECTED[0], [("some/set", "test")])
    with pytest.raises(ConfigError, match=r"some/set \(test\) row 2: 'output'"):
        rows[2]


@pytest.mark.parametrize(
    ("name", "address"), [("squad", "rajpurkar/squad"), ("tulu3_sft_mixture", "allenai/tulu-3-sft-mixture")]
)
def test_names_of_the_field(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, address: str) -> None:
    hub = Hub(PAIRS)
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    read_rows(Dataset(dataset_name=name), folder / "r.yaml", "data.train")
    assert hub.asked == [(address, "train")]


def test_a_set_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def load(name: str, split: str) -> None:
        raise ConnectionError("no network\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        ConfigError,
        match=r"data\.train\.dataset_name: cannot load rajpurkar/squad \(train\) \(no network\); "
        r"the hub must .*or data\.train\.data_path name a copy",
    ):
        read_rows(Dataset(dataset_name="squad"), folder / "r.yaml", "data.train")
