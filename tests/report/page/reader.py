# SPDX-License-Identifier: Apache-2.0
"""A page read back by Python's own HTML parser."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

_VOID = frozenset({"meta", "link", "input", "br"})


class Reader(HTMLParser):
    """What a page holds: ids, links, texts; `problems` where its tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self._open]

    @property
    def text(self) -> str:
        """All texts outside style and script, with single spaces."""
        return " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids, links and names of attributes."""
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag that closes itself."""
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        """Check that the innermost open tag is closed."""
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing at line {self.getpos()[0]}")

    def handle_data(self, data: str) -> None:
        """Keep what is shown."""
        if self._open and self._open[-1] not in ("style", "script"):
            self._text.append(data)
