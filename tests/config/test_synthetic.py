# SPDX-License-Identifier: Apache-2.0
"""The shipped rows that stand for public data sets: made again bit by bit, and as long as they say."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics

import pytest

from tests.config.helpers import RECIPES


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("make_synthetic", RECIPES / "data/make_synthetic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name):
    return [json.loads(line) for line in (RECIPES / "data" / name).read_text().splitlines()]


def length(row):
    if "context" in row:
        return len(row["context"]) + len(row["question"]) + len(row["answers"]["text"][0])
    return sum(len(message["content"]) for message in row["messages"])


def test_the_files_are_what_the_script_writes(made):
    for name, expected in made.make_rows().items():
        assert rows(name) == expected
        assert len(expected) == 512


@pytest.mark.parametrize(
    ("name", "median", "sigma", "longest"),
    [("short-answers.jsonl", 180, 0.35, 520), ("long-chat.jsonl", 372, 1.1, 4110)],
)
def test_lengths_are_as_stated(name, median, sigma, longest):
    lengths = [length(row) for row in rows(name)]
    logs = [math.log(each) for each in lengths]
    # Of 512 rows the median of the logs is known to about 1.25 sigma / sqrt(512); thrice that is allowed.
    assert abs(statistics.median(logs) - math.log(median)) < 3 * 1.25 * sigma / math.sqrt(512)
    # Cutting at both ends takes a little of the spread.
    assert 0.85 * sigma < statistics.stdev(logs) < 1.1 * sigma
    assert max(lengths) <= longest


@pytest.mark.parametrize(("name", "median", "sigma"), [("short-answers", 180, 0.35), ("long-chat", 372, 1.1)])
@pytest.mark.parametrize("share", [0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95])
def test_percentiles_are_those_of_the_stated_distribution(name, median, sigma, share):
    lengths = [length(row) for row in rows(f"{name}.jsonl")]
    percentile = median * math.exp(sigma * statistics.NormalDist().inv_cdf(share))
    # How many of 512 rows are shorter is binomial; thrice its deviation is allowed.
    shorter = sum(each <= percentile for each in lengths) / len(lengths)
    assert abs(shorter - share) < 3 * math.sqrt(share * (1 - share) / len(lengths))


def test_answers_are_a_few_tokens_and_prompts_a_paragraph():
    questions = rows("short-answers.jsonl")
    answers = [len(row["answers"]["text"][0]) for row in questions]
    prompts = sorted(len(row["context"]) + len(row["question"]) for row in questions)
    assert statistics.median(answers) == 5
    assert prompts[len(prompts) // 4] > 130
    assert prompts[3 * len(prompts) // 4] < 250


def test_a_few_conversations_hold_a_large_part_of_all_tokens():
    lengths = [length(row) for row in rows("long-chat.jsonl")]
    long = [each for each in lengths if each > 2048]
    # Of the lognormal distribution 6 % are above 2048.
    assert 0.03 < len(long) / len(lengths) < 0.09
    assert sum(long) / sum(lengths) > 0.2
    assert max(lengths) >= 4096


def test_every_question_is_answered_by_its_context():
    for row in rows("short-answers.jsonl"):
        asked = row["question"].removeprefix("What is ").removesuffix("?")
        facts = [fact.rstrip(".") for fact in row["context"].split(". ")]
        assert f"{asked} is {row['answers']['text'][0]}" in facts


def test_every_reply_says_the_words_in_turn():
    for row in rows("long-chat.jsonl"):
        turns = row["messages"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        for request, reply in zip(turns[::2], turns[1::2], strict=True):
            words = request["content"].removeprefix("Say in turn: ").split()
            said = reply["content"].split()
            assert said == [words[number % len(words)] for number in range(len(said))]
