# SPDX-License-Identifier: Apache-2.0
"""Words and numbers for readers: nothing that a terminal, a log or an XML file could stumble over."""


def printable(text: str) -> str:
    """The text with a backslash escape for every character that has no glyph; a blank stays a blank."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def number_text(value: float) -> str:
    """The shortest text that reads back as the same number; whole numbers without a fraction."""
    return repr(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)


def percent_text(value: float) -> str:
    """A share in percent for a table: one decimal, two digits where that would read 0.0."""
    return f"{value:.1f} %" if abs(value) >= 0.1 or value == 0.0 else f"{value:.2g} %"


def shortened(text: str, limit: int = 40) -> str:
    """The text, cut at `limit` characters with a mark."""
    return text if len(text) <= limit else text[:limit] + "…"
