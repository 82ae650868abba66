# SPDX-License-Identifier: Apache-2.0
"""Bash text as commands, pipelines and the blocks they stand in. Nothing runs.

It reads what shell scripts of test suites are made of. What it does not understand (an open quote, a block
that does not end) is a ConfigError with file and line, never a guess.
"""

from __future__ import annotations

import re
from pathlib import Path

from lora_suite.plan.external.commands import (
    Assignment,
    Block,
    BlockKind,
    Command,
    Comment,
    Fragment,
    Pipeline,
    ShellText,
    Word,
)
from lora_suite.plan.external.words import WordReader

_OPENERS: dict[str, BlockKind] = {
    "if": "if",
    "for": "loop",
    "while": "loop",
    "until": "loop",
    "select": "loop",
    "case": "case",
    "{": "group",
}
_CLOSERS: dict[str, BlockKind] = {"fi": "if", "done": "loop", "esac": "case", "}": "group"}
_BEFORE_A_COMMAND = frozenset({"then", "else", "elif", "do", "!", "time"})
_OPERATOR = re.compile(r"\|\||&&|;;&|;;|;&|\|&|\||;|&(?!>)|\(|\)|\n")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<<-|<<|>>|>\||>&|<&|<>|<|>)")
_FUNCTION = re.compile(r"[\w:.-]+")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=")


def parse_shell(path: Path, text: str) -> ShellText:
    """Take a script apart; raises ConfigError with file and line where it cannot be read."""
    return _Parser(path, text).parse()


class _Parser(WordReader):
    """One pass over a script's text."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        self._blocks: list[Block] = []
        self._pipelines: list[Pipeline] = []
        self._comments: list[Comment] = []
        self._heredocs: list[str] = []
        self._commands: list[Command] = []
        self._closed: Word | None = None
        self._begin()

    def parse(self) -> ShellText:
        while self._at < len(self._text):
            self._step()
        self._end_pipeline(";")
        if self._blocks:
            block = self._blocks[-1]
            raise self._error(f"the {block.kind} block that begins here never ends", block.line)
        return ShellText(tuple(self._pipelines), tuple(self._comments))

    def _begin(self) -> None:
        """Start an empty command."""
        self._assignments: list[Assignment] = []
        self._words: list[Word] = []
        self._redirections: list[tuple[str, Word]] = []

    def _step(self) -> None:
        """Read one token: blank, comment, operator, redirection or word."""
        rest = self._text[self._at]
        if rest in " \t":
            self._at += 1
        elif self._text.startswith("\\\n", self._at):
            self._at += 2
            self._line += 1
        elif rest == "#":
            self._comment()
        elif self._text.startswith(("<(", ">("), self._at):
            self._add(self._word())
        elif redirection := _REDIRECTION.match(self._text, self._at):
            self._redirect(redirection[0])
        elif operator := _OPERATOR.match(self._text, self._at):
            self._operate(operator[0])
        elif self._is_empty() and re.match(r"\[\[\s", self._text[self._at : self._at + 3]):
            self._test()
        elif self._is_empty() and self._text.startswith("((", self._at):
            self._operate("(")
        else:
            self._add(self._word())

    def _is_empty(self) -> bool:
        return not (self._words or self._assignments or self._redirections)

    def _comment(self) -> None:
        end = self._text.find("\n", self._at)
        end = len(self._text) if end < 0 else end
        begin = self._text.rfind("\n", 0, self._at) + 1
        alone = not self._text[begin : self._at].strip()
        self._comments.append(Comment(self._line, self._text[self._at + 1 : end].strip(), alone))
        self._at = end

    def _redirect(self, operator: str) -> None:
        self._at += len(operator)
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        if self._at >= len(self._text) or self._text[self._at] in "\n;|()":
            raise self._error(f"nothing follows {operator}", self._line)
        target = self._word()
        if operator.lstrip("0123456789") in ("<<", "<<-"):
            self._heredocs.append("".join(part.text for part in target.fragments))
        self._redirections.append((operator, target))

    def _operate(self, operator: str) -> None:
        self._at += len(operator)
        if operator == "(":
            self._parenthesis()
        elif operator == ")":
            self._close_parenthesis()
        elif operator in ("|", "|&"):
            if self._is_empty():
                self._pipe_a_block(operator)
            self._end_command()
        else:
            self._end_pipeline(";" if operator in ("\n", ";;", ";&", ";;&") else operator)
        if operator == "\n":
            self._line += 1
            self._skip_heredocs()

    def _pipe_a_block(self, operator: str) -> None:
        """`done | …`: the block as a whole is the pipe's first command, known by the word that closed it."""
        if self._closed is None:
            raise self._error(f"nothing stands before {operator}", self._line)
        self._words.append(self._closed)

    def _parenthesis(self) -> None:
        if len(self._words) == 1 and self._text[self._at :].lstrip(" \t").startswith(")"):
            name = self._words.pop().raw
            if not _FUNCTION.fullmatch(name):
                raise self._error(f"{name}() is no name of a function", self._line)
            self._at = self._text.index(")", self._at) + 1
            body = re.compile(r"\s*\{").match(self._text, self._at)
            if body is None:
                raise self._error(f"the function {name} has no {{ body }}", self._line)
            self._blocks.append(Block("function", self._line, name))
            self._line += body[0].count("\n")
            self._at = body.end()
            self._begin()
        elif self._is_empty():
            if self._text.startswith("(", self._at):
                self._arithmetic_command()
            else:
                self._blocks.append(Block("group", self._line, "("))
        else:
            raise self._error("a parenthesis stands where bash expects a word; quote it", self._line)

    def _arithmetic_command(self) -> None:
        """`(( … ))`: one command of that name with the raw expression."""
        end = self._text.find("))", self._at)
        if end < 0:
            raise self._error("(( never ends", self._line)
        inner = self._text[self._at + 1 : end]
        words = [_plain("((", self._line), _plain(inner.strip(), self._line), _plain("))", self._line)]
        self._words += words
        self._line += inner.count("\n")
        self._at = end + 2

    def _close_parenthesis(self) -> None:
        if self._blocks and self._blocks[-1].kind == "case":
            # The pattern of a branch, which is no command.
            self._begin()
            self._commands = []
            return
        self._end_pipeline(";")
        if not self._blocks or self._blocks[-1].text != "(":
            raise self._error("a ) closes nothing", self._line)
        self._blocks.pop()
        self._closed = _plain(")", self._line)

    def _test(self) -> None:
        """`[[ … ]]`, inside which operators mean comparisons."""
        start, line = self._at, self._line
        self._at += 2
        while not self._text.startswith("]]", self._at):
            if self._at >= len(self._text):
                raise self._error("[[ never ends", line)
            if self._text[self._at] == "\n":
                self._line += 1
                self._at += 1
            elif self._text[self._at] in " \t()<>&|;":
                self._at += 1
            else:
                self._word()
        inner = self._text[start + 2 : self._at].strip()
        self._at += 2
        self._words += [_plain("[[", line), _plain(inner, line), _plain("]]", line)]

    def _add(self, word: Word) -> None:
        if not self._words and not self._redirections:
            if not self._assignments and self._keyword(word):
                return
            assignment = _as_assignment(word)
            if assignment is not None:
                if not assignment.value.fragments and self._text.startswith("(", self._at):
                    assignment = Assignment(assignment.name, self._array(word), assignment.append)
                self._assignments.append(assignment)
                return
        self._words.append(word)

    def _array(self, word: Word) -> Word:
        """The value of `NAME=( … )`: its raw text, parentheses included."""
        start, line = self._at, self._line
        self._at += 1
        while not self._text.startswith(")", self._at):
            if self._at >= len(self._text):
                raise self._error("the list ( never ends", line)
            if self._text[self._at] == "#":
                self._comment()
            elif self._text[self._at] in " \t\n" or self._text.startswith("\\\n", self._at):
                self._line += self._text[self._at : self._at + 2].startswith("\\\n")
                self._line += self._text[self._at] == "\n"
                self._at += 2 if self._text.startswith("\\\n", self._at) else 1
            else:
                self._word()
        self._at += 1
        raw = self._text[start : self._at]
        return Word((Fragment(raw, ""),), word.line, raw)

    def _keyword(self, word: Word) -> bool:
        """Open, turn or close a block if the word is a reserved one; whether it was."""
        raw = word.raw
        if raw in _BEFORE_A_COMMAND:
            if raw in ("then", "elif", "else") and self._blocks and self._blocks[-1].kind == "if":
                block = self._blocks[-1]
                text = self._rest_of_line() if raw == "elif" else block.text
                self._blocks[-1] = Block("if", block.line, text, raw)
            elif raw in ("then", "elif", "else", "do") and (
                not self._blocks or self._blocks[-1].kind == "if"
            ):
                raise self._error(f"{raw} has no beginning", word.line)
            return True
        if raw == "function":
            match = re.compile(r"\s*([\w:.-]+)\s*(\(\s*\))?\s*\{").match(self._text, self._at)
            if match is None:
                raise self._error("a function needs a name and a { body }", word.line)
            self._blocks.append(Block("function", word.line, match[1]))
            self._line += match[0].count("\n")
            self._at = match.end()
            return True
        if raw in _OPENERS:
            kind = _OPENERS[raw]
            self._blocks.append(Block(kind, word.line, self._rest_of_line(), "if" if kind == "if" else ""))
            if raw in ("for", "select", "case"):
                self._skip_head(raw)
            return True
        if raw in _CLOSERS:
            expected = _CLOSERS[raw]
            kinds = ("group", "function") if raw == "}" else (expected,)
            if not self._blocks or self._blocks[-1].kind not in kinds:
                raise self._error(f"{raw} closes nothing", word.line)
            self._blocks.pop()
            self._closed = word
            return True
        return False

    def _skip_head(self, keyword: str) -> None:
        """Skip what is no command: the list of a `for`, the subject of a `case`."""
        while self._at < len(self._text) and self._text[self._at] not in "\n;":
            if self._text[self._at] in " \t()<>":
                self._at += 1
            else:
                word = self._word()
                if keyword == "case" and word.raw == "in":
                    return

    def _rest_of_line(self) -> str:
        """What follows on this line, up to `; then` or `; do`, for messages and rules."""
        end = self._text.find("\n", self._at)
        line = self._text[self._at : end if end >= 0 else len(self._text)]
        return re.sub(r"\s*;\s*(then|do)\b.*$", "", line).strip()

    def _end_command(self) -> None:
        if self._is_empty():
            return
        first = (self._words or [item.value for item in self._assignments] or [self._redirections[0][1]])[0]
        line = min([first.line, *(item.value.line for item in self._assignments)])
        self._commands.append(
            Command(line, tuple(self._assignments), tuple(self._words), tuple(self._redirections))
        )
        self._begin()

    def _end_pipeline(self, connector: str) -> None:
        self._end_command()
        self._closed = None
        if self._commands:
            self._pipelines.append(Pipeline(tuple(self._commands), connector, tuple(self._blocks)))
            self._commands = []

    def _skip_heredocs(self) -> None:
        for end in self._heredocs:
            begin = self._line
            while True:
                if self._at >= len(self._text):
                    raise self._error(f"the here-document never reaches {end}", begin)
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                line = self._text[self._at : stop]
                self._at = min(stop + 1, len(self._text))
                self._line += 1
                if line.strip() == end:
                    break
        self._heredocs = []


def _plain(text: str, line: int) -> Word:
    return Word((Fragment(text, ""),), line, text)


def _as_assignment(word: Word) -> Assignment | None:
    match = _ASSIGNMENT.match(word.raw)
    if match is None or not word.fragments or word.fragments[0].quote:
        return None
    first = word.fragments[0]
    rest = Fragment(first.text[match.end() :], "")
    fragments = tuple(part for part in (rest, *word.fragments[1:]) if part.text or part.quote)
    value = Word(fragments, word.line, word.raw[match.end() :])
    return Assignment(match["name"], value, match["append"] == "+")
