# SPDX-License-Identifier: Apache-2.0
"""What a bash word would become, as far as that can be known without running anything.

Known are variables of the script itself, defaults (``${NAME:-4}``), integer arithmetic, and the path idioms
by which scripts find themselves (`dirname`, `basename`, `realpath`, ``cd … && pwd``). The environment of the
planner is never read: a script must mean the same wherever it is planned.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from lora_suite.plan.external.commands import Word

_REFERENCE = re.compile(
    r"\\(?P<escaped>[$`\\\"])"
    r"|\$\(\((?P<arithmetic>.*?)\)\)(?!\))"
    r"|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#?$!-])"
    r"|\$\{(?P<braced>[A-Za-z_]\w*(?:\[[^\]]*\])?|[0-9@*#?]|!?\w+)(?P<change>[^{}]*(?:\$?\{[^{}]*\}[^{}]*)*)\}",
    re.DOTALL,
)
_DEFAULT = re.compile(r":?[-=](?P<text>.*)", re.DOTALL)
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MOST_DIGITS = 18

Values = Mapping[str, str]


def expand(word: Word, values: Values) -> tuple[str, bool]:
    """The word's text with everything known put in, and whether all of it was known.

    What is not known stays as it is written, with its dollar.
    """
    known = True
    text = ""
    for part in word.fragments:
        if part.quote == "'":
            text += part.text
            continue
        made, complete = expand_text(part.text, values)
        text += made
        known &= complete
    return text, known


def expand_text(text: str, values: Values) -> tuple[str, bool]:
    """`expand` for raw text outside single quotes."""
    pieces: list[str] = []
    known, at = True, 0
    while at < len(text):
        substitution = _command_substitution(text, at)
        if substitution is not None:
            value = _path_of(text[at + 2 : substitution - 1], values)
            pieces.append(text[at:substitution] if value is None else value)
            known &= value is not None
            at = substitution
            continue
        match = _REFERENCE.match(text, at)
        if match is None:
            known &= text[at] != "`"
            pieces.append(text[at])
            at += 1
            continue
        value = _value(match, values)
        pieces.append(match[0] if value is None else value)
        known &= value is not None
        at = match.end()
    return "".join(pieces), known


def arithmetic(text: str, values: Values) -> int | None:
    """The value of ``$(( text ))``; None where it is not made of known integers and ``+ - * / %``.

    Division truncates toward zero and an unset variable counts as 0 in bash; here it makes the value unknown.
    """
    expanded, known = expand_text(text, values)
    if not known:
        return None
    try:
        tree = ast.parse(expanded.strip(), mode="eval")
        return _integer(tree.body, values)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _integer(node: ast.expr, values: Values) -> int:
    """Evaluate one node; ValueError for what is no integer arithmetic."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in values and len(values[name]) <= _MOST_DIGITS:
            return int(values[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(operand, values)
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right):
            return _quotient(_integer(left, values), _integer(right, values))
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            dividend, divisor = _integer(left, values), _integer(right, values)
            return dividend - divisor * _quotient(dividend, divisor)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_integer(left, values), _integer(right, values))
    raise ValueError("no integer arithmetic")


def _quotient(dividend: int, divisor: int) -> int:
    """Integer division that truncates toward zero, as bash's does."""
    whole = abs(dividend) // abs(divisor)
    return whole if (dividend < 0) == (divisor < 0) else -whole


def _value(match: re.Match[str], values: Values) -> str | None:
    """What one reference becomes, None if that is not known."""
    if match["escaped"] is not None:
        return match["escaped"]
    if match["arithmetic"] is not None:
        result = arithmetic(match["arithmetic"], values)
        return None if result is None else str(result)
    name = match["plain"] or match["braced"]
    change = match["change"] or ""
    if not change:
        return values.get(name)
    default = _DEFAULT.fullmatch(change)
    if default is None:
        return None
    if values.get(name):
        return values[name]
    text, known = expand_text(default["text"], values)
    return text if known else None


def _command_substitution(text: str, at: int) -> int | None:
    """The end of a ``$(…)`` that begins at `at`; None if there is none."""
    if not text.startswith("$(", at) or text.startswith("$((", at):
        return None
    depth, place = 0, at + 1
    while place < len(text):
        depth += (text[place] == "(") - (text[place] == ")")
        place += 1
        if depth == 0:
            return place
    return None


def _path_of(command: str, values: Values) -> str | None:
    """What a command substitution prints if it is one of the path idioms; nothing is looked up or run."""
    command = re.sub(r"(?:&|\d)?>\s*/dev/null", " ", command).strip()
    inner = re.fullmatch(r"cd\s+(?:--\s+)?(?P<folder>.+?)\s*(?:&&|;)\s*pwd(?:\s+-P)?", command, re.DOTALL)
    if inner is not None:
        folder = _one_word(inner["folder"], values)
        return None if folder is None else os.path.normpath(folder)
    program, _, rest = command.partition(" ")
    rest = rest.strip().removeprefix("-- ").strip()
    match program:
        case "dirname":
            path = _one_word(rest, values)
            return None if path is None else str(Path(path).parent)
        case "realpath" | "readlink":
            path = _one_word(rest.removeprefix("-f "), values)
            return None if path is None else os.path.normpath(path)
        case "basename":
            return _basename(rest, values)
    return None


def _basename(arguments: str, values: Values) -> str | None:
    """`basename PATH [SUFFIX]`."""
    text, known = expand_text(arguments, values)
    try:
        words = shlex.split(text) if known else []
    except ValueError:
        return None
    if len(words) not in (1, 2):
        return None
    name = Path(words[0]).name
    return name.removesuffix(words[1]) if len(words) == 2 else name


def _one_word(text: str, values: Values) -> str | None:
    """The value of a single, maybe quoted, word."""
    made, known = expand_text(text.strip().replace('"', ""), values)
    return made if known and made and "'" not in made else None
