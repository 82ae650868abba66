# SPDX-License-Identifier: Apache-2.0
"""Conversations become text of which parts are learnt: by a chat template, or one message after the other.

A template that marks what the assistant generates (``{% generation %}``) says itself what is learnt. Most
templates do not; then an assistant's turn is what the rendered conversation gains by it, from where the
conversation before it ends (https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3359 learnt everything
instead, https://github.com/Liquid4All/liquid-finetune/pull/37 nothing).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from lora_suite.config import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.train.data.rows import ASSISTANT, Message, Row
from lora_suite.train.data.tokenizer import PASSTHROUGH, TextTokenizer

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


@dataclass(frozen=True)
class Piece:
    """A part of a conversation's text that is tokenized by itself, and whether it is learnt.

    A border between pieces is a border between tokens, as it is when a model answers a prompt.
    """

    text: str
    learnt: bool


class Template(Protocol):
    """Renders conversations."""

    def pieces(self, row: Row) -> list[Piece]:
        """The row's text; raises ConfigError naming its place."""
        ...


@dataclass(frozen=True)
class Passthrough:
    """The texts of all messages one after the other; the assistant's are learnt, or the last one alone."""

    only_final: bool

    def pieces(self, row: Row) -> list[Piece]:
        """One piece a message."""
        final = len(row.messages) - 1
        return [
            Piece(each.content, each.role == ASSISTANT and (index == final or not self.only_final))
            for index, each in enumerate(row.messages)
        ]


class ChatTemplate:
    """A Jinja template, rendered as the transformers library renders it.

    tokenizer: its special tokens are variables of the template, and close turns. kwargs: more variables.
    add_generation_prompt: without markers, the assistant's header belongs to the prompt, not to what is
    learnt. only_final: learn the last message alone.
    """

    def __init__(
        self,
        source: str,
        tokenizer: TextTokenizer,
        kwargs: dict[str, Any],
        *,
        add_generation_prompt: bool,
        only_final: bool,
    ) -> None:
        self._source = source
        self._variables = {**tokenizer.special_tokens, **kwargs}
        self._closing = sorted(tokenizer.special_texts, key=len, reverse=True)
        self._add_generation_prompt = add_generation_prompt
        self._only_final = only_final
        self._marked = _MARKER.search(source) is not None

    def pieces(self, row: Row) -> list[Piece]:
        """The rendered conversation, cut where what is learnt begins and ends.

        Line breaks at its very end, which nothing follows, are left out.
        """
        whole, marked = self._render(row.messages, row.place, markers=self._marked)
        text = whole.rstrip("\n")
        if self._marked:
            spans = list(self._of_markers(marked, text, row))
        else:
            spans = [self._of_turn(index, text, row) for index in self._turns(row)]
        return list(_cut(text, spans))

    def _turns(self, row: Row) -> list[int]:
        final = len(row.messages) - 1
        if self._only_final:
            return [final]
        return [index for index, each in enumerate(row.messages) if each.role == ASSISTANT]

    def _of_markers(self, marked: Sequence[Span], text: str, row: Row) -> Iterator[Span]:
        """What the template marks, and the special token that closes a turn where it marks only the text."""
        first = self._of_turn(len(row.messages) - 1, text, row)[0] if self._only_final else 0
        for start, end in marked:
            if start >= first:
                closing = next((each for each in self._closing if text.startswith(each, end)), "")
                yield start, min(end + len(closing), len(text))

    def _of_turn(self, index: int, text: str, row: Row) -> Span:
        """An assistant's turn: from where the conversation before it ends to where the one with it ends."""
        messages, place = row.messages, row.place
        if index == 0:
            raise ConfigError(
                f"{place}: the first message is the assistant's, so there is nothing to compare with; begin "
                "with another role, or use a chat template with {% generation %} markers"
            )
        before, _ = self._render(messages[:index], place, header=self._add_generation_prompt)
        start = self._border(before, text, index, place)
        if index == len(messages) - 1:
            return start, len(text)
        through, _ = self._render(messages[: index + 1], place)
        return start, self._border(through, text, index, place)

    def _border(self, part: str, text: str, index: int, place: str) -> int:
        """How far the text of a part of the conversation is the beginning of the whole text.

        A part may end in what only ends a conversation: line breaks and special tokens.
        """
        border = _common(part, text)
        rest = part[border:]
        for closing in self._closing:
            rest = rest.replace(closing, "")
        if rest.strip():
            raise ConfigError(
                f"{place}: the chat template renders what stands before or in messages[{index}] differently "
                "once more messages follow, so the assistant's turns cannot be told by comparison; use a "
                "template with {% generation %} markers (policy.tokenizer.chat_template), or conversations "
                "of one answer"
            )
        return border

    def _render(
        self, messages: Sequence[Message], place: str, *, header: bool = False, markers: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the spans that the template marks, where those are asked for."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [{"role": each.role, "content": each.content} for each in messages]
        try:
            # Its annotation says str, which it has not returned since templates could mark spans.
            (text,), spans = cast(Any, render_jinja_template)(
                conversations=[conversation],
                chat_template=self._source,
                return_assistant_tokens_mask=markers,
                add_generation_prompt=header,
                **self._variables,
            )
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"{place}: the chat template cannot render the row: {error}") from error
        return text, spans[0] if markers else []


def _common(left: str, right: str) -> int:
    """How many characters two texts have in common from their beginning."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(right))


def _cut(text: str, spans: Sequence[Span]) -> Iterator[Piece]:
    """Pieces of a text, of which the spans are learnt."""
    done = 0
    for start, end in spans:
        yield Piece(text[done:start], learnt=False)
        yield Piece(text[start:end], learnt=True)
        done = end
    yield Piece(text[done:], learnt=False)


def template_of(recipe: Recipe, tokenizer: TextTokenizer, recipe_path: Path) -> Template:
    """The recipe's chat template.

    ``policy.tokenizer.chat_template`` is ``null`` (no template: the messages' texts), ``default``, which a
    deleted key means too (the tokenizer's own), a path that ends in ``.jinja``, or the template itself.
    """
    from lora_suite.config.paths import locate

    config, data = recipe.policy.tokenizer, recipe.data
    key = "policy.tokenizer.chat_template"
    source = PASSTHROUGH if config.chat_template is None else config.chat_template
    if source == "default":
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{key}: the tokenizer {config.name} has no template of its own; give one (a path that ends "
                f"in .jinja, or the text itself), or set {key}=null to join the texts as they are"
            )
        source = tokenizer.chat_template
    elif source.endswith(".jinja"):
        found = locate(source, recipe_path)
        if found is None:
            raise ConfigError(f"{key}: there is no file {source}")
        source = found.read_text(encoding="utf-8")
    if source == PASSTHROUGH:
        return Passthrough(data.only_unmask_final)
    return ChatTemplate(
        source,
        tokenizer,
        config.chat_template_kwargs or {},
        add_generation_prompt=data.add_generation_prompt,
        only_final=data.only_unmask_final,
    )
