# SPDX-License-Identifier: Apache-2.0
"""Limits of one GPU model put into a driver's text, and the difference as a patch."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_suite.plan.external.commands import Command
from lora_suite.plan.external.shell import parse_shell

_LONGEST_LINE = 110
_CALL = "check"


@dataclass(frozen=True)
class _Word:
    """An expression of a `check` call with the conditions that hold for it."""

    expression: str
    when: str | None
    on: str | None


@dataclass(frozen=True)
class Machine:
    """What limits are keyed by: the word after ``--on``, a part of the device's whole name."""

    model: str
    device: str


def put_limits(
    path: Path, text: str, machine: Machine, limits: Mapping[str, str], added: Sequence[str]
) -> str:
    """Return a driver's text with new limits for one machine.

    limits: for an expression as it stands there, the one with the new limit. An expression for every machine
    becomes one for this, in a call of its own. One for this machine is replaced; where a call has limits for
    others alone, the new one is put beside them. added: expressions that the driver has not, for its end.
    Raises ConfigError for a text that is not readable as bash.
    """
    lines = text.splitlines()
    calls = [
        pipeline.commands[0]
        for pipeline in parse_shell(path, text).pipelines
        if len(pipeline.commands) == 1 and pipeline.commands[0].name == _CALL
    ]
    # From the end, so that the lines above keep their numbers.
    for call in reversed(calls):
        words = list(_words(call))
        if any(word.expression in limits for word in words):
            last = max(word.line + word.raw.count("\n") for word in call.words)
            lines[call.line - 1 : last] = _calls(words, machine, limits)
    lines += [_call([_Word(expression, None, machine.model)]) for expression in added]
    return "\n".join(lines) + "\n"


def patch(path: Path, before: str, after: str) -> str:
    """The difference as `git apply` takes it, with paths from the root of the file's repository."""
    whole = path.resolve()
    root = next((each for each in whole.parents if (each / ".git").exists()), whole.parent.parent)
    name = whole.relative_to(root).as_posix()
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _words(call: Command) -> Iterator[_Word]:
    """The expressions of a call; a condition holds for those after it, until another of its kind."""
    conditions: dict[str, str | None] = {"--when": None, "--on": None}
    pending: str | None = None
    for word in call.words[1:]:
        value = word.literal if word.literal is not None else word.raw
        if pending is not None:
            conditions[pending], pending = value, None
        elif value in conditions:
            pending = value
        else:
            yield _Word(value, conditions["--when"], conditions["--on"])


def _calls(words: Sequence[_Word], machine: Machine, limits: Mapping[str, str]) -> Iterator[str]:
    """The lines that take a call's place: what stays, then a call for each limit that gets a machine."""
    own = [word for word in words if word.on is None and word.expression in limits]
    staying = [word for word in words if word not in own]
    if staying:
        yield _call(_with_alternative(staying, machine, limits))
    for word in own:
        yield _call([_Word(limits[word.expression], word.when, machine.model)])


def _with_alternative(words: Sequence[_Word], machine: Machine, limits: Mapping[str, str]) -> list[_Word]:
    """The expressions of a call with the limits of this machine: replaced, or else behind the others'."""
    mine = [word for word in words if word.on and word.on.casefold() in machine.device.casefold()]
    if mine:
        return [
            _Word(limits.get(word.expression, word.expression), word.when, word.on) if word in mine else word
            for word in words
        ]
    new = dict.fromkeys(
        _Word(limits[word.expression], word.when, machine.model)
        for word in words
        if word.on and word.expression in limits
    )
    return [*words, *new]


def _call(words: Sequence[_Word]) -> str:
    """A `check` call; on several lines where one would be too long."""
    parts: list[str] = []
    when: str | None = None
    on: str | None = None
    for word in words:
        part = ""
        if word.when is not None and word.when != when:
            part += f"--when {shlex.quote(word.when)} "
        if word.on is not None and word.on != on:
            part += f"--on {shlex.quote(word.on)} "
        when, on = word.when, word.on
        parts.append(part + _quoted(word.expression))
    line = f"{_CALL} {' '.join(parts)}"
    return line if len(line) <= _LONGEST_LINE else f"{_CALL} " + " \\\n  ".join(parts)


def _quoted(expression: str) -> str:
    """An expression in single quotes, which it has none of itself unless it was written otherwise."""
    return f"'{expression}'" if "'" not in expression else shlex.quote(expression)
