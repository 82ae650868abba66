# SPDX-License-Identifier: Apache-2.0
"""Just enough of bash's quoting to tell, line by line, what stands outside quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator

_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
_CODE, _SINGLE, _DOUBLE = "(", "'", '"'


def unquoted_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield ``(line number, code)``: each line with quoted text, comments and here-documents blanked out.

    A command substitution within double quotes is code again. Quotes may span lines.
    """
    contexts = [_CODE]
    until: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if until is not None:
            until = None if line.strip() == until else until
            yield number, ""
            continue
        code = _unquoted(line, contexts)
        heredoc = _HEREDOC.search(line) if "<<" in code else None
        until = heredoc[2] if heredoc else None
        yield number, code


def _unquoted(line: str, contexts: list[str]) -> str:
    """Return the line with all but code blanked; `contexts` carries open quotes to the next line."""
    kept = []
    at = 0
    while at < len(line):
        character, context = line[at], contexts[-1]
        if context == _SINGLE:
            if character == _SINGLE:
                contexts.pop()
        elif character == "\\":
            kept.append(" ")
            at += 1
        elif character == _DOUBLE:
            contexts.pop() if context == _DOUBLE else contexts.append(_DOUBLE)
        elif line.startswith("$(", at):
            contexts.append(_CODE)
            kept.append(" ")
            at += 1
        elif context == _CODE:
            if character == "#" and (at == 0 or line[at - 1] in " \t;"):
                break
            if character == _SINGLE:
                contexts.append(_SINGLE)
            elif character == "(":
                contexts.append(_CODE)
            elif character == ")" and len(contexts) > 1:
                contexts.pop()
            kept.append(" " if character == _SINGLE else character)
            at += 1
            continue
        kept.append(" ")
        at += 1
    return "".join(kept)
