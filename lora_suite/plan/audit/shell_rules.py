# SPDX-License-Identifier: Apache-2.0
"""Rules about what bash does with a script: what it skips, hides, splits; and notes that came true."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from lora_suite.plan.audit.finding import AuditFinding
from lora_suite.plan.audit.repository import Repository
from lora_suite.plan.external.commands import Block, Command, Comment, ShellText
from lora_suite.plan.external.script import Script, ScriptCheck

# The family's own name for "exit 0 if old results are complete", wherever it is defined.
_EXITING = frozenset({"exit_if_max_steps_reached"})
_PROGRAMS = re.compile(
    r"(?:^|/)(?:uv|python[\d.]*|torchrun|srun|accelerate|bash|sh|check_metrics(?:\.py)?|lora-suite)$"
)
_DO_NOTHING = ("true", ":")
_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
_READS_METRICS = re.compile(r"\bjq\b|METRICS|metrics\.json")
_NOTE = re.compile(r"\brevert|\brestore|\bback to\b|\b(?:once|when|after)\b.*\bfix", re.IGNORECASE)
_LIMIT = re.compile(r"([<>]=?)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)")
# Lines between a note and the check that it is about, or the call that the check stands in.
_NEAR = 6


def lint_shell(repository: Repository, script: Script) -> Iterator[AuditFinding]:
    """Yield what is wrong with a script as a program."""
    file = repository.shown(script.path)
    for line, kind, subject, message in (
        *_skipped(script),
        *_exits(repository, script),
        *_swallowed(script),
        *_pipes(repository, script),
        *_unquoted(script),
        *_stale(script),
    ):
        yield AuditFinding(kind, file, line, subject, message)


_Found = Iterator[tuple[int, str, str, str]]


def _skipped(script: Script) -> _Found:
    """Guards around checks that let a short run end with status 0."""
    guards = Counter(guard for guard in map(_guard, script.checks) if guard is not None)
    for guard, skipped in guards.items():
        if not _else_fails(script, guard):
            message = f"{skipped} checks run only `if {_short(guard.text)}`, and nothing fails otherwise"
            yield guard.line, "skipped-checks", "guard", message


def _guard(check: ScriptCheck) -> Block | None:
    """The `if` around a check that asks how far the run came, by $MAX_STEPS or by what is in its metrics."""
    if check.guard is not None:
        return check.guard
    ifs = (block for block in check.blocks if block.kind == "if" and block.branch == "then")
    return next((block for block in ifs if _READS_METRICS.search(block.text)), None)


def _else_fails(script: Script, guard: Block) -> bool:
    """Whether the guard's `else` ends the script with a bad status."""
    for command, pipeline in script.commands:
        inside = any(each.line == guard.line and each.branch == "else" for each in pipeline.blocks)
        if inside and (command.name == "false" or (command.name == "exit" and not _exits_well(command))):
            return True
    return False


def _exits(repository: Repository, script: Script) -> _Found:
    """Ways out of the script with status 0, above one of its checks."""
    if not script.checks:
        return
    last = max(check.call for check in script.checks)
    exiting = _EXITING.union(*(_exiting_functions(text) for _, text in repository.sourced(script) if text))
    for command, pipeline in script.commands:
        if command.line > last or any(block.kind == "function" for block in pipeline.blocks):
            continue
        if command.name in exiting:
            message = f"{command.name} ends with status 0 where old results are complete, checked or not"
            yield command.line, "exit-before-checks", command.name, message
        elif command.name == "exit" and _exits_well(command):
            yield command.line, "exit-before-checks", "exit", "exit 0 comes before a check"


def _exiting_functions(text: ShellText) -> set[str]:
    """Functions of a sourced file that can end the script with status 0."""
    return {
        block.text
        for pipeline in text.pipelines
        for command in pipeline.commands
        for block in pipeline.blocks
        if block.kind == "function" and command.name == "exit" and _exits_well(command)
    }


def _exits_well(command: Command) -> bool:
    """Whether an `exit` gives status 0, or whatever came before it."""
    return len(command.words) < 2 or command.words[1].raw == "0"


def _swallowed(script: Script) -> _Found:
    """`PROGRAM || true`."""
    for pipeline, following in zip(script.pipelines, script.pipelines[1:], strict=False):
        if pipeline.connector != "||" or following.commands[0].name not in _DO_NOTHING:
            continue
        program = next((each for each in pipeline.commands if _PROGRAMS.search(each.name)), None)
        if program is not None:
            said = " ".join(word.raw for word in program.words[:3])
            message = f"`{said} … || {following.commands[0].name}` never fails"
            yield pipeline.line, "swallowed-failure", said, message


def _pipes(repository: Repository, script: Script) -> _Found:
    """Pipes before `set -o pipefail`, in the script or in what it has sourced by then."""
    guards = [command.line for command, _ in script.commands if _sets_pipefail(command)]
    for line, text in repository.sourced(script):
        # Of a file that cannot be read it is not known that it sets nothing.
        if text is None or any(
            _sets_pipefail(command) for pipeline in text.pipelines for command in pipeline.commands
        ):
            guards.append(line)
    for pipeline in script.pipelines:
        if len(pipeline.commands) > 1 and not any(line < pipeline.line for line in guards):
            first = pipeline.commands[0].name
            message = f"if {first} fails, the pipe ends with the status of {pipeline.commands[-1].name}"
            yield pipeline.line, "pipe-before-pipefail", first, message


def _sets_pipefail(command: Command) -> bool:
    return command.name == "set" and any(word.raw == "pipefail" for word in command.words)


def _unquoted(script: Script) -> _Found:
    """`$@` outside quotes."""
    for command, _ in script.commands:
        for word in command.words:
            if word.raw in _ARGUMENTS:
                message = f"{word.raw} is split at spaces, and patterns in it are expanded"
                yield word.line, "unquoted-arguments", word.raw, message


def _stale(script: Script) -> _Found:
    """Notes that a limit is to be reverted to what it is already."""
    for note in script.comments:
        limits = _limits(_with_following(script, note)) if _NOTE.search(note.text) else set()
        for check in script.checks:
            reverted = limits & _limits(check.expression)
            near = min(abs(line - note.line) for line in (check.line, check.call)) <= _NEAR
            if near and reverted:
                operator, value = min(reverted)
                message = f"the check in line {check.line} already has {operator} {value:g}"
                yield note.line, "stale-note", check.expression, message
                break


def _with_following(script: Script, note: Comment) -> str:
    """A note and the line of comment below it, on which its sentence may end."""
    below = (each.text for each in script.comments if each.alone and each.line == note.line + 1)
    return f"{note.text} {next(below, '')}"


def _limits(text: str) -> set[tuple[str, float]]:
    """Every comparison with a number: ``< 30`` and ``< 30.0`` are one."""
    return {(operator, float(value)) for operator, value in _LIMIT.findall(text)}


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]} … {text[-18:]}"
