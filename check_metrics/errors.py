# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with the caller's input; a caller that catches both classes never sees a traceback."""

from check_metrics.text import shortened

_SHOWN_TEXT = 200


class MetricsError(Exception):
    """A file cannot be read as metrics; the message names the file, the place and a remedy."""


class ExpressionError(Exception):
    """A check is no expression of the language, or names an arm that is not there.

    `token` is the offending piece of `text` and `column` its 1-based place (None where the text as a
    whole is at fault).
    """

    def __init__(self, text: str, reason: str, token: str = "", column: int | None = None) -> None:
        self.text = text
        self.reason = reason
        self.token = token
        self.column = column
        place = f", column {column}, at {token!r}" if column is not None else ""
        super().__init__(f"check {shortened(text, _SHOWN_TEXT)!r}{place}: {reason}")


class DataError(Exception):
    """A check cannot be decided on this data (missing, empty, not finite); its verdict is FAIL."""
