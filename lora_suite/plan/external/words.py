# SPDX-License-Identifier: Apache-2.0
"""Reads bash words: quotes, escapes, and substitutions as raw text."""

from __future__ import annotations

from pathlib import Path

from lora_suite.config.errors import ConfigError
from lora_suite.plan.external.commands import Fragment, Word

_ENDS_A_WORD = " \t\n;&|()<>"


class WordReader:
    """A place in a script's text, and how to read one word from there. Errors name file and line."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._line = 1

    def _word(self) -> Word:
        """Read one word, quotes and substitutions included."""
        start, line = self._at, self._line
        fragments: list[Fragment] = []
        bare = ""
        if self._text.startswith(("<(", ">("), self._at):
            self._at += 2
            self._balanced("(", ")")
            bare = self._text[start : self._at]
        while self._at < len(self._text) and self._text[self._at] not in _ENDS_A_WORD:
            character = self._text[self._at]
            if character == "\\":
                if self._text.startswith("\\\n", self._at):
                    self._line += 1
                else:
                    fragments += [Fragment(bare, ""), Fragment(self._text[self._at + 1 : self._at + 2], "'")]
                    bare = ""
                self._at += 2
            elif character == "'" or self._text.startswith("$'", self._at):
                fragments += [Fragment(bare, ""), self._single()]
                bare = ""
            elif character == '"':
                fragments += [Fragment(bare, ""), self._double()]
                bare = ""
            elif character in "$`":
                bare += self._substitution()
            else:
                bare += character
                self._at += 1
        fragments.append(Fragment(bare, ""))
        kept = tuple(part for part in fragments if part.text or part.quote)
        return Word(kept, line, self._text[start : self._at])

    def _single(self) -> Fragment:
        begin = self._text.index("'", self._at) + 1
        end = self._text.find("'", begin)
        if end < 0:
            raise self._error("the quote ' never ends", self._line)
        text = self._text[begin:end]
        self._line += text.count("\n")
        self._at = end + 1
        return Fragment(text, "'")

    def _double(self) -> Fragment:
        line = self._line
        self._at += 1
        text = ""
        while not self._text.startswith('"', self._at):
            if self._at >= len(self._text):
                raise self._error('the quote " never ends', line)
            character = self._text[self._at]
            following = self._text[self._at + 1 : self._at + 2]
            if character == "\\" and following and following in '"\\`$\n':
                # An escaped dollar must not look like an expansion.
                text += {"\n": "", "$": "\\$"}.get(following, following)
                self._line += following == "\n"
                self._at += 2
            elif character in "$`":
                text += self._substitution()
            else:
                text += character
                self._line += character == "\n"
                self._at += 1
        self._at += 1
        return Fragment(text, '"')

    def _substitution(self) -> str:
        """Read `$NAME`, `${…}`, `$(…)`, `$((…))` or `` `…` `` as raw text."""
        start = self._at
        if self._text.startswith(("$(", "${"), self._at):
            opening = self._text[self._at + 1]
            self._at += 2
            self._balanced(opening, {"(": ")", "{": "}"}[opening])
        elif self._text[self._at] == "`":
            end = self._text.find("`", self._at + 1)
            if end < 0:
                raise self._error("the quote ` never ends", self._line)
            self._line += self._text.count("\n", self._at, end)
            self._at = end + 1
        else:
            self._at += 1
        return self._text[start : self._at]

    def _balanced(self, opening: str, closing: str) -> None:
        """Skip to the bracket that closes the substitution, over quotes and nested brackets."""
        depth, line = 1, self._line
        while depth:
            if self._at >= len(self._text):
                raise self._error(f"the substitution ${opening} never ends", line)
            character = self._text[self._at]
            if character == "\\":
                self._at += 2
            elif character == "'":
                self._single()
            elif character == '"':
                self._double()
            elif character in "$`" and self._text[self._at : self._at + 2] in ("$(", "${"):
                self._substitution()
            else:
                depth += (character == opening) - (character == closing)
                self._line += character == "\n"
                self._at += 1

    def _error(self, what: str, line: int) -> ConfigError:
        return ConfigError(f"{self._path}:{line}: not readable as bash: {what}")
