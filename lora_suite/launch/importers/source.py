# SPDX-License-Identifier: Apache-2.0
"""JSON of other programs: reading it, and telling what in it is a number."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from check_metrics.errors import MetricsError
from check_metrics.loading import parse_json, read_text
from lora_suite.config.errors import ConfigError


def text_of(path: Path) -> str:
    """Text of a file; ConfigError where there is none."""
    try:
        return read_text(path, "a source of metrics")
    except MetricsError as error:
        raise ConfigError(str(error)) from None


def json_of(where: str, text: str) -> Any:
    """Value of a JSON text, NaN and Infinity included; ConfigError where it is none or has a key twice."""
    try:
        return parse_json(where, text)
    except MetricsError as error:
        raise ConfigError(str(error)) from None


def number(value: Any) -> float | None:
    """The number that a JSON value means, or None.

    null and words such as "nan" and "inf" are NaN and infinities: a writer that cannot say NaN says that.
    """
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:
        return None


class Numbers:
    """Sorts numbers from what is none, and counts the latter."""

    def __init__(self) -> None:
        self._left_out: Counter[str] = Counter()

    def of(self, name: str, value: Any) -> float | None:
        """The number, or None for what is none."""
        meant = number(value)
        if meant is None:
            self._left_out[name] += 1
        return meant

    def warnings(self) -> list[str]:
        """One line that names what was left out, if anything was."""
        if not self._left_out:
            return []
        names = ", ".join(f"{name} ({count})" for name, count in self._left_out.most_common())
        return [f"{self._left_out.total()} values are no numbers and are left out: {names}"]
