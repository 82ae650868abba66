# SPDX-License-Identifier: Apache-2.0
"""Reading rows: what is read, and what an error says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset
from lora_suite.train.data.rows import Row, read_rows

ROWS = Dataset(data_path="rows.jsonl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe, from which relative paths count."""
    (tmp_path / "recipe.yaml").write_text("{}")
    return tmp_path


def read(folder: Path, text: str | bytes, dataset: Dataset = ROWS) -> list[Row]:
    content = text if isinstance(text, bytes) else text.encode()
    (folder / "rows.jsonl").write_bytes(content)
    rows = read_rows(dataset, folder / "recipe.yaml", "data.train")
    return [rows[index] for index in range(len(rows))]


def test_rows_are_read_in_order_and_blank_lines_skipped(folder: Path) -> None:
    text = '{"input": "1+1=", "output": "2", "more": 0}\n\n{"input": "", "output": "\\u00e9"}'
    assert read(folder, text) == [Row("1+1=", "2"), Row("", "é")]


def test_other_keys(folder: Path) -> None:
    dataset = Dataset(data_path="rows.jsonl", input_key="q", output_key="a")
    assert read(folder, '{"q": "a", "a": "b"}', dataset) == [Row("a", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"', r"rows\.jsonl:2: not a line of JSON"),
        (b'{"input": "\xff"}', r"rows\.jsonl:2: not a line of JSON in UTF-8"),
        ('{"input": "a"}', r"rows\.jsonl:2: no key 'output' \(data\.train\.output_key\); the row has input"),
        (
            '{"input": 3, "output": "b"}',
            r"rows\.jsonl:2: 'input' \(data\.train\.input_key\) must be text, not 3",
        ),
        ('["a", "b"]', r"rows\.jsonl:2: a row is an object with the keys 'input' and 'output'"),
        ('{"messages": []}', r"rows\.jsonl:2: .*rows of chat messages are not read"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(folder: Path, line: str | bytes, message: str) -> None:
    content = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(ConfigError, match=message):
        read(folder, b'{"input": "a", "output": "b"}\n' + content)


def test_a_missing_or_empty_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.data_path: rows\.jsonl has no rows"):
        read(folder, "\n")
    with pytest.raises(ConfigError, match=r"data\.validation\.data_path: there is no file other\.jsonl"):
        read_rows(Dataset(data_path="other.jsonl"), folder / "recipe.yaml", "data.validation")


def test_rows_of_the_hub_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import datasets

    asked = []

    def load(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([{"input": "a", "output": "b"}, {"input": "c", "output": None}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = read_rows(Dataset(dataset_name="some/set", split="test"), folder / "r.yaml", "data.train")
    assert asked == [("some/set", "test")]
    assert len(rows) == 2
    assert rows[0] == Row("a", "b")
    with pytest.raises(ConfigError, match=r"some/set \(test\) row 1: 'output'"):
        rows[1]


def test_a_set_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import datasets

    def load(name: str, split: str) -> None:
        raise ConnectionError("no network\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        ConfigError, match=r"data\.train\.dataset_name: cannot load some/set \(train\) \(no network\)"
    ):
        read_rows(Dataset(dataset_name="some/set"), folder / "r.yaml", "data.train")
