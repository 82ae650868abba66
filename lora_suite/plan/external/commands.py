# SPDX-License-Identifier: Apache-2.0
"""What a bash script consists of: words with their quoting, commands, pipelines, blocks, comments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quote = Literal["", "'", '"']
BlockKind = Literal["if", "loop", "case", "function", "group"]


@dataclass(frozen=True)
class Fragment:
    """A part of a word with one kind of quoting: outside quotes, in single or in double quotes.

    An escaped character outside quotes is a fragment in single quotes, which is what it means.
    """

    text: str
    quote: Quote


@dataclass(frozen=True)
class Word:
    """One word as bash would see it before it expands anything; `raw` is its text in the file."""

    fragments: tuple[Fragment, ...]
    line: int
    raw: str

    @property
    def literal(self) -> str | None:
        """The word's value where nothing in it would be expanded, else None."""
        if any(part.quote != "'" and ("$" in part.text or "`" in part.text) for part in self.fragments):
            return None
        return "".join(part.text for part in self.fragments)


@dataclass(frozen=True)
class Assignment:
    """`NAME=VALUE` (or `NAME+=VALUE`) at the beginning of a command."""

    name: str
    value: Word
    append: bool


@dataclass(frozen=True)
class Command:
    """A simple command: assignments in front, then words; redirections (operator and target) apart.

    A `[[ … ]]` test is the words ``[[``, its raw text, ``]]``.
    """

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirections: tuple[tuple[str, Word], ...]

    @property
    def name(self) -> str:
        """The program or builtin, empty for a command that only assigns."""
        return self.words[0].raw if self.words else ""


@dataclass(frozen=True)
class Block:
    """What a command stands in: kind, first line, and what decides about it.

    text: raw words after the keyword (``if [[ … ]]``), or the function's name. branch: for an `if`, which
    part: ``if`` (the condition itself), ``then``, ``elif``, ``else``.
    """

    kind: BlockKind
    line: int
    text: str
    branch: str = ""


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by ``|``, and how the next pipeline is joined to it: ``;``, ``&&``, ``||`` or ``&``.

    blocks: the blocks around it, outermost first.
    """

    commands: tuple[Command, ...]
    connector: str
    blocks: tuple[Block, ...]

    @property
    def line(self) -> int:
        """Line of its first word."""
        return self.commands[0].line


@dataclass(frozen=True)
class Comment:
    """A comment without its leading ``#``; `alone` if nothing else is on its line."""

    line: int
    text: str
    alone: bool


@dataclass(frozen=True)
class ShellText:
    """A script taken apart: pipelines in the order of the file, and comments."""

    pipelines: tuple[Pipeline, ...]
    comments: tuple[Comment, ...]
