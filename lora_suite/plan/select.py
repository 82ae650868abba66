# SPDX-License-Identifier: Apache-2.0
"""`-k EXPR` and `-m EXPR`: which of a suite is wanted, in the words that pytest users know."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import get_args

from lora_suite.config.errors import ConfigError
from lora_suite.plan.suite_file import Tier

Matcher = Callable[[Iterable[str]], bool]
_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")


def parse_tiers(text: str) -> Callable[[str], bool]:
    """Return a function that says whether a tier is wanted; as `parse_selection`, of whole words."""
    known = get_args(Tier)
    for word in _TOKEN.findall(text):
        if word not in (*known, "and", "or", "not", "(", ")"):
            raise ConfigError(f"-m {text!r}: there is no tier {word!r}; there are {', '.join(known)}")
    matches = parse_selection(text, option="-m")
    return lambda tier: matches([tier])


def parse_selection(text: str, option: str = "-k") -> Matcher:
    """Return a function that says whether names match `text`, the value of `option`.

    `text` combines words with `and`, `or`, `not` and parentheses; a word holds if it is part of any of the
    names, upper or lower case. Raises ConfigError for text that is not such an expression.
    """
    tokens = _TOKEN.findall(text)
    told = f"{option} {text!r}"
    matcher, rest = _either(tokens, told)
    if rest:
        raise _unexpected(rest, told)
    return lambda names: matcher([name.lower() for name in names])


def _either(tokens: list[str], told: str) -> tuple[Matcher, list[str]]:
    """Parse `a or b or …`."""
    left, rest = _both(tokens, told)
    if rest[:1] == ["or"]:
        right, rest = _either(rest[1:], told)
        return (lambda names: left(names) or right(names)), rest
    return left, rest


def _both(tokens: list[str], told: str) -> tuple[Matcher, list[str]]:
    """Parse `a and b and …`."""
    left, rest = _one(tokens, told)
    if rest[:1] == ["and"]:
        right, rest = _both(rest[1:], told)
        return (lambda names: left(names) and right(names)), rest
    return left, rest


def _one(tokens: list[str], told: str) -> tuple[Matcher, list[str]]:
    """Parse a word, `not a` or `( … )`."""
    if not tokens or tokens[0] in ("and", "or", ")"):
        raise _unexpected(tokens, told)
    token, rest = tokens[0], tokens[1:]
    if token == "not":
        inner, rest = _one(rest, told)
        return (lambda names: not inner(names)), rest
    if token == "(":
        inner, rest = _either(rest, told)
        if rest[:1] != [")"]:
            raise _unexpected(rest, told)
        return inner, rest[1:]
    word = token.lower()
    return (lambda names: any(word in name for name in names)), rest


def _unexpected(tokens: list[str], told: str) -> ConfigError:
    """The error for a token that cannot stand where it does; told: the option and its value."""
    found = f"{tokens[0]!r} cannot stand there" if tokens else "something is missing at the end"
    return ConfigError(f"{told}: {found}; write names with and, or, not and parentheses")
