# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set as conversations, whatever they look like in the file.

Three shapes are read, told apart by their keys: a prompt and a response; chat messages, as the Tulu-3 SFT
mixture has them (https://huggingface.co/datasets/allenai/tulu-3-sft-mixture); a context, a question and its
answers, as SQuAD has them (https://huggingface.co/datasets/rajpurkar/squad).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lora_suite.config import ConfigError
from lora_suite.config.schema import Dataset

ASSISTANT = "assistant"
"""The role whose messages are learnt."""

_QUESTION = ("context", "question", "answers")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: who speaks (``system``, ``user``, ``assistant``, …), and the text."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One training example: a conversation, whose last message is the assistant's.

    place: file and line, or data set and index, for whoever must say what is wrong with it.
    """

    messages: tuple[Message, ...]
    place: str = field(default="a row", compare=False)

    @classmethod
    def of_pair(cls, prompt: str, response: str, place: str = "a row") -> Row:
        """A prompt, which is not learnt, and a response, which is."""
        return cls((Message("user", prompt), Message(ASSISTANT, response)), place)


def to_row(value: Any, dataset: Dataset, place: str, key: str) -> Row:
    """The conversation that one value of a file or data set is.

    key: the data set's place in the recipe (``data.train``), for messages. Raises ConfigError naming the
    row's place for what is not a row, and for one without anything to learn.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: a row is an object with {_shapes(dataset)}, not {value!r:.60}")
    if dataset.input_key in value and dataset.output_key in value:
        row = _of_pair(value, dataset, place, key)
    elif dataset.chat_key in value:
        row = Row(tuple(_messages(value, dataset, place, key)), place)
    elif all(name in value for name in _QUESTION):
        row = _of_question(value, place)
    else:
        _refuse_keys(value, dataset, place, key)
    if not row.messages[-1].content.strip():
        raise ConfigError(f"{place}: the response is empty, so there is nothing to learn; drop the row")
    return row


def _of_pair(value: Mapping[str, Any], dataset: Dataset, place: str, key: str) -> Row:
    for setting, name in (("input_key", dataset.input_key), ("output_key", dataset.output_key)):
        if not isinstance(value[name], str):
            raise ConfigError(f"{place}: {name!r} ({key}.{setting}) must be text, not {value[name]!r:.60}")
    return Row.of_pair(value[dataset.input_key], value[dataset.output_key], place)


def _messages(value: Mapping[str, Any], dataset: Dataset, place: str, key: str) -> Iterator[Message]:
    """The messages of a chat row; nothing that a row says is left out in silence."""
    name = dataset.chat_key
    messages = value[name]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigError(f"{place}: {name!r} ({key}.chat_key) must be a list of messages")
    if not messages:
        raise ConfigError(f"{place}: {name!r} is empty; drop the row")
    if value.get("tools"):
        raise ConfigError(f"{place}: tools are not read; drop the row")
    for index, message in enumerate(messages):
        turn = f"{place}: {name}[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"{turn}: a message is an object with 'role' and 'content', not {message!r:.60}"
            )
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{turn}: 'content' must be text, not {message.get('content')!r:.60}")
        more = sorted(each for each in message if each not in ("role", "content") and message[each])
        if more:
            raise ConfigError(f"{turn}: {', '.join(map(repr, more))}: only role and content are read")
        yield Message(message["role"], message["content"])
    if messages[-1]["role"] != ASSISTANT:
        raise ConfigError(
            f"{place}: the last message is of role {messages[-1]['role']!r}, not {ASSISTANT!r}; "
            "cut the conversation after the assistant's last message"
        )


def _of_question(value: Mapping[str, Any], place: str) -> Row:
    """SQuAD's row: the context as system message, the question, and the first of its answers."""
    answers = value["answers"]
    texts = answers.get("text") if isinstance(answers, Mapping) else None
    if not texts:
        raise ConfigError(f"{place}: the question has no answer ('answers.text' is empty); drop the row")
    parts = (("system", value["context"]), ("user", value["question"]), (ASSISTANT, texts[0]))
    for role, text in parts:
        if not isinstance(text, str):
            raise ConfigError(
                f"{place}: context, question and answer must be text, not {text!r:.60} ({role})"
            )
    return Row(tuple(Message(role, text) for role, text in parts), place)


def _refuse_keys(value: Mapping[str, Any], dataset: Dataset, place: str, key: str) -> NoReturn:
    has = ", ".join(sorted(map(str, value))) or "no keys"
    if dataset.input_key in value or dataset.output_key in value:
        settings = {dataset.input_key: "input_key", dataset.output_key: "output_key"}
        name = next(each for each in settings if each not in value)
        raise ConfigError(f"{place}: no key {name!r} ({key}.{settings[name]}); the row has {has}")
    raise ConfigError(
        f"{place}: a row has {_shapes(dataset)}, this one has {has}; "
        f"set {key}.input_key and {key}.output_key, or {key}.chat_key"
    )


def _shapes(dataset: Dataset) -> str:
    return (
        f"the keys {dataset.input_key!r} and {dataset.output_key!r}, or {dataset.chat_key!r}, "
        f"or {', '.join(map(repr, _QUESTION))}"
    )
