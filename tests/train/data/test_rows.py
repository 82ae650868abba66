# SPDX-License-Identifier: Apache-2.0
"""What becomes of a value of a file: a conversation, or an error that names the row."""

from __future__ import annotations

from typing import Any

import pytest

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset
from lora_suite.train.data.rows import Message, Row, to_row

CHAT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def row_of(value: Any, **keys: Any) -> Row:
    return to_row(value, Dataset(data_path="x", **keys), "rows.jsonl:2", "data.train")


def test_a_prompt_and_a_response() -> None:
    row = row_of({"input": "1+1=", "output": "2", "more": 0})
    assert row.messages == (Message("user", "1+1="), Message("assistant", "2"))
    assert row == Row.of_pair("1+1=", "2")
    assert row.place == "rows.jsonl:2"
    assert row_of({"q": "a", "a": "b"}, input_key="q", output_key="a") == Row.of_pair("a", "b")


def test_chat_messages_as_the_tulu_3_mixture_has_them() -> None:
    value = {
        "id": "oasst1_4093",
        "messages": [
            {"content": "Name a river.", "role": "user"},
            {"content": "The Elbe.", "role": "assistant"},
            {"content": "And another?", "role": "user"},
            {"content": "The Oder.", "role": "assistant"},
        ],
        "source": "ai2-adapt-dev/oasst1_converted",
    }
    assert row_of(value).messages == (
        Message("user", "Name a river."),
        Message("assistant", "The Elbe."),
        Message("user", "And another?"),
        Message("assistant", "The Oder."),
    )
    assert row_of({"talk": value["messages"]}, chat_key="talk") == row_of(value)


def test_a_question_as_squad_has_it() -> None:
    value = {
        "id": "5733be284776f41900661182",
        "title": "A_Title",
        "context": "The bridge was built in 1901 by two brothers.",
        "question": "When was the bridge built?",
        "answers": {"text": ["1901", "in 1901"], "answer_start": [24, 21]},
    }
    assert row_of(value).messages == (
        Message("system", "The bridge was built in 1901 by two brothers."),
        Message("user", "When was the bridge built?"),
        Message("assistant", "1901"),
    )


def test_a_pair_wins_over_other_shapes_in_the_same_row() -> None:
    assert row_of({"input": "a", "output": "b", "messages": []}) == Row.of_pair("a", "b")


# The library fills keys that a row lacks with None; those say nothing.
def test_keys_without_a_value_are_no_keys() -> None:
    value = {"messages": [each | {"tool_calls": None} for each in CHAT], "tools": []}
    assert row_of(value) == row_of({"messages": CHAT})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"input": "a"}, r"no key 'output' \(data\.train\.output_key\); the row has input"),
        ({"input": 3, "output": "b"}, r"'input' \(data\.train\.input_key\) must be text, not 3"),
        ({"input": "a", "output": None}, r"'output' \(data\.train\.output_key\) must be text, not None"),
        ({"input": "a", "output": " \n"}, r"the response is empty"),
        (["a", "b"], r"a row is an object with the keys 'input' and 'output', or 'messages'"),
        ({"text": "a"}, r"a row has the keys 'input' and 'output', or 'messages'.* this one has text; set "),
        # https://github.com/NVIDIA-NeMo/RL/issues/1574
        ({"messages": []}, r"'messages' is empty"),
        ({"messages": None}, r"'messages' \(data\.train\.chat_key\) must be a list of messages"),
        ({"messages": "hi"}, r"'messages' \(data\.train\.chat_key\) must be a list of messages"),
        ({"messages": ["hi"]}, r"messages\[0\]: a message is an object with 'role' and 'content', not 'hi'"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\]: a message is an object with 'role'"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None}]},
            r"\[1\]: 'content' must be text, not None",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": [1]}]},
            r"\[1\]: 'content' must be text, not \[1\]",
        ),
        ({"messages": CHAT[:1]}, r"the last message is of role 'user', not 'assistant'"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": ""}]}, r"the response is empty"),
        ({"messages": [CHAT[0] | {"name": "x"}, CHAT[1]]}, r"messages\[0\]: 'name': only role and content"),
        ({"messages": CHAT, "tools": [{"name": "f"}]}, r"tools are not read"),
        ({"context": "c", "question": "q", "answers": {"text": []}}, r"the question has no answer"),
        ({"context": "c", "question": "q", "answers": "a"}, r"the question has no answer"),
        ({"context": 3, "question": "q", "answers": {"text": ["a"]}}, r"must be text, not 3 \(system\)"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:2: .*" + message.removeprefix("^")):
        row_of(value)
