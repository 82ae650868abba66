# SPDX-License-Identifier: Apache-2.0
"""All data of a recipe: splits, counts, and rows that are too few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.train.data.load import load_data
from tests.train.conftest import RECIPE, small_recipe

VALIDATE = ("sft.val_period=1", "sft.val_batches=0", "sft.val_global_batch_size=2")


def rows_file(folder: Path, count: int, prompt: str = "p") -> str:
    path = folder / f"rows{count}.jsonl"
    lines = [json.dumps({"input": f"{prompt}{number}", "output": "yes"}) for number in range(count)]
    path.write_text("\n".join(lines))
    return f"data.train.data_path={path}"


def test_the_recipes_own_data() -> None:
    data = load_data(small_recipe(*VALIDATE), RECIPE)
    assert len(data.steps) == 4
    assert all(len(batch.examples) == 4 for batch in data.steps)
    assert data.counts["rows"] >= 512
    assert data.counts["validation_rows"] > 0
    assert data.validation


def test_without_validation_no_validation_row_is_tokenized() -> None:
    data = load_data(small_recipe(), RECIPE)
    assert data.validation == []
    assert data.counts["validation_examined"] == 0


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    recipe = small_recipe(
        rows_file(tmp_path, 10), "data.validation=null", "data.train.split_validation_size=0.2", *VALIDATE
    )
    data = load_data(recipe, RECIPE)
    trained = {bytes(each.tokens) for batch in data.steps for each in batch.examples}
    held_out = {bytes(each.tokens) for batch in data.validation for each in batch.examples}
    assert (len(trained), len(held_out)) == (8, 2)
    assert not trained & held_out


def test_too_few_rows_say_how_many_and_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 of 3 rows have a token to learn.*train_global_batch_size is 4"):
        load_data(small_recipe(rows_file(tmp_path, 3)), RECIPE)
    cut = (rows_file(tmp_path, 9, prompt="long " * 20), "data.max_input_seq_length=16")
    with pytest.raises(ConfigError, match=r"0 of 9 rows have a token to learn.*max_input_seq_length is 16"):
        load_data(small_recipe(*cut), RECIPE)


def test_epochs_end_the_training_early(tmp_path: Path) -> None:
    data = load_data(small_recipe(rows_file(tmp_path, 9), "sft.max_num_epochs=1"), RECIPE)
    assert len(data.steps) == 2


@pytest.mark.parametrize("packed", ["false", "true"])
@pytest.mark.parametrize(("name", "length"), [("short-answers", 512), ("long-chat", 4096)])
def test_the_rows_that_stand_for_public_data_sets(name: str, length: int, packed: str) -> None:
    recipe = small_recipe(
        f"data.train.data_path=data/{name}.jsonl",
        "policy.tokenizer.chat_template=templates/turns.jinja",
        "data.validation=null",
        "data.train.split_validation_size=0.1",
        f"policy.max_total_sequence_length={length}",
        f"policy.sequence_packing.enabled={packed}",
        "policy.train_global_batch_size=32",
        *VALIDATE,
    )
    data = load_data(recipe, RECIPE)
    assert (len(data.steps), data.counts["rows"], data.counts["dropped_no_target"]) == (4, 512, 0)
    # The template's own texts come on top of the rows' lengths.
    assert data.counts["truncated"] < 0.02 * data.counts["examined"]
    for batch in data.steps:
        rows, needed = data.slicing.slots(batch, 1) / length, batch.tokens / length
        # Packed, rows fill all sequences but the last well; else every row takes a whole one.
        assert needed <= rows <= 1.3 * needed + 1 if packed == "true" else rows == 32
