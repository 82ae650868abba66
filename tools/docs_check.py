# SPDX-License-Identifier: Apache-2.0
"""Check what the pages say can be found: tests are collected, links lead somewhere, commands parse.

Tests are those in backticks, `tests/room/test_x.py::test_name`, with a class or parameters if wanted. Links
are relative ones, with their headings. Commands are calls of lora-suite and check_metrics in code blocks.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import click

from check_metrics.cli import command as check_metrics
from lora_suite.cli import main as lora_suite

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS: dict[str, click.Command] = {"lora-suite": lora_suite, "check_metrics": check_metrics}

_TEST = re.compile(r"`(tests/[\w/-]+\.py)(::[^`]+)?`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+:")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```\w*\n(.*?)^```|^((?: {4}.*\n)+)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`\n]+`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_OPERATORS = "();<>|&"


def main() -> int:
    """Print what is wrong in the pages of this repository; exit 1 if anything is."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    files = {file for text in texts.values() for file, _ in _TEST.findall(text) if (ROOT / file).exists()}
    collected = collect(ROOT, sorted(files))
    problems = [
        f"{page.relative_to(ROOT)}: {problem}"
        for page, text in texts.items()
        for problem in (*missing_tests(ROOT, text, collected), *dead_links(page, text), *bad_commands(text))
    ]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    if not collected:
        print("no page names a test: is this the repository?", file=sys.stderr)
    return 1 if problems or not collected else 0


def collect(root: Path, files: Collection[str]) -> set[str]:
    """Ids of the tests that pytest finds in some files; SystemExit with pytest's words where it cannot."""
    if not files:
        return set()
    call = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(call, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"pytest could not collect the tests that the pages name:\n{done.stdout}{done.stderr}"
        )
    return {line for line in done.stdout.splitlines() if "::" in line}


def missing_tests(root: Path, text: str, collected: Collection[str]) -> Iterator[str]:
    """Tests that a page names and pytest does not collect. Without parameters all of a test's are meant."""
    known = {*collected, *(part for each in collected for part in _parents(each))}
    for file, name in _TEST.findall(text):
        if name and file + name not in known:
            yield f"no test {file}{name} is collected"
        elif not (root / file).is_file():
            yield f"there is no {file}"


def _parents(test: str) -> Iterator[str]:
    """The id without its parameters, and its class."""
    bare = test.partition("[")[0]
    yield bare
    yield bare.rpartition("::")[0]


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Relative links whose file, or heading in it, is not there."""
    prose = _INLINE.sub("", _FENCE.sub("", text))
    for target in _LINK.findall(prose):
        if _ELSEWHERE.match(target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and anchor not in _anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: no such heading"


def _anchors(text: str) -> set[str]:
    """Headings as links name them: lower case, blanks as hyphens, no punctuation."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def bad_commands(text: str) -> Iterator[str]:
    """Calls of our commands, in code blocks, whose subcommand or option does not exist."""
    for fenced, indented in _CODE.findall(text):
        for line in (fenced or indented).replace("\\\n", " ").splitlines():
            for words in _commands(line):
                if problem := _refusal(words):
                    yield f"{' '.join(words)}: {problem}"


def _commands(line: str) -> Iterator[list[str]]:
    """The calls of our programs in one line of shell."""
    if not any(program in line for program in PROGRAMS):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in [*lexer, ";"]:
            if set(word) <= set(_OPERATORS):
                if words and Path(words[0]).name in PROGRAMS:
                    yield words
                words = []
            else:
                words.append(word)
    except ValueError:
        # An open quote: the line is output or prose, or goes on in the next one.
        return


def _refusal(words: list[str]) -> str | None:
    """Why click would refuse a call; None if it would not."""
    command, rest = PROGRAMS[Path(words[0]).name], words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.commands.get(rest[0])
        if found is None:
            return f"there is no command {rest[0]!r}"
        command, rest = found, rest[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.make_context(words[0], rest)
    except click.exceptions.Exit:
        return None
    except click.ClickException as error:
        return error.format_message()
    return None


if __name__ == "__main__":
    sys.exit(main())
