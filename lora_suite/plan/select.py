# SPDX-License-Identifier: Apache-2.0
"""`-k EXPR`: which cases and pairs of a suite are wanted, in the words that pytest users know."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from lora_suite.config.errors import ConfigError

Matcher = Callable[[Iterable[str]], bool]
_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")


def parse_selection(text: str) -> Matcher:
    """Return a function that says whether names match `text`.

    `text` combines words with `and`, `or`, `not` and parentheses; a word holds if it is part of any of the
    names, upper or lower case. Raises ConfigError for text that is not such an expression.
    """
    tokens = _TOKEN.findall(text)
    matcher, rest = _either(tokens, text)
    if rest:
        raise _unexpected(rest, text)
    return lambda names: matcher([name.lower() for name in names])


def _either(tokens: list[str], text: str) -> tuple[Matcher, list[str]]:
    """Parse `a or b or …`."""
    left, rest = _both(tokens, text)
    if rest[:1] == ["or"]:
        right, rest = _either(rest[1:], text)
        return (lambda names: left(names) or right(names)), rest
    return left, rest


def _both(tokens: list[str], text: str) -> tuple[Matcher, list[str]]:
    """Parse `a and b and …`."""
    left, rest = _one(tokens, text)
    if rest[:1] == ["and"]:
        right, rest = _both(rest[1:], text)
        return (lambda names: left(names) and right(names)), rest
    return left, rest


def _one(tokens: list[str], text: str) -> tuple[Matcher, list[str]]:
    """Parse a word, `not a` or `( … )`."""
    if not tokens or tokens[0] in ("and", "or", ")"):
        raise _unexpected(tokens, text)
    token, rest = tokens[0], tokens[1:]
    if token == "not":
        inner, rest = _one(rest, text)
        return (lambda names: not inner(names)), rest
    if token == "(":
        inner, rest = _either(rest, text)
        if rest[:1] != [")"]:
            raise _unexpected(rest, text)
        return inner, rest[1:]
    word = token.lower()
    return (lambda names: any(word in name for name in names)), rest


def _unexpected(tokens: list[str], text: str) -> ConfigError:
    """The error for a token that cannot stand where it does."""
    found = f"{tokens[0]!r} cannot stand there" if tokens else "something is missing at the end"
    return ConfigError(f"-k {text!r}: {found}; write names with and, or, not and parentheses")
