# SPDX-License-Identifier: Apache-2.0
"""The shipped rows: right answers, made again bit by bit, none seen twice, short enough."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.config.helpers import RECIPES, TINY, load

FILES = ("quickstart.jsonl", "quickstart-validation.jsonl")


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_quickstart", RECIPES / "data/make_quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name):
    return [json.loads(line) for line in (RECIPES / "data" / name).read_text().splitlines()]


def right(row):
    """Answer a task from its text alone, in another way than the generator does."""
    prompt, answer = row["input"], row["output"][1:]
    if prompt.endswith("="):
        return eval(prompt[:-1]) == int(answer)  # our own rows: two numbers and a sign
    if prompt.startswith("Copy"):
        return prompt == f"Copy: {answer}"
    if prompt.startswith("Reverse"):
        return prompt == f"Reverse: {answer[::-1]}"
    if prompt.startswith("How many"):
        return len(prompt.split()[-1].replace("b", "").rstrip("?")) == int(answer)
    return "apital" in prompt and answer.isascii() and answer[0].isupper()


@pytest.mark.parametrize("name", FILES)
def test_every_answer_is_right(generator, name):
    for row in rows(name):
        assert row.keys() == {"input", "output"}
        assert right(row), row
        assert generator.check(row), row
        assert not generator.check({**row, "output": row["output"] + "x"})


def test_the_generator_makes_the_shipped_files(generator, tmp_path, capsys):
    generator.main(tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (RECIPES / "data" / name).read_bytes()


def test_there_are_enough_rows_and_no_prompt_twice():
    train, validation = (rows(name) for name in FILES)
    assert (len(train), len(validation)) == (640, 64)
    prompts = [row["input"] for row in train + validation]
    assert len(set(prompts)) == len(prompts)


def test_rows_fit_the_tiny_recipe_with_their_special_tokens():
    longest = max(len((row["input"] + row["output"]).encode()) for name in FILES for row in rows(name))
    assert longest <= 64
    assert longest + 2 <= load(path=TINY).recipe.policy.max_total_sequence_length


def test_every_task_is_there(generator):
    starts = {row["input"].split()[0] for row in rows(FILES[0])}
    assert {"Copy:", "Reverse:", "How"} <= starts
    assert sum("apital" in row["input"] for row in rows(FILES[0])) > 50
    with pytest.raises(ValueError, match="no task"):
        generator.answer("Sing!")
