# SPDX-License-Identifier: Apache-2.0
"""Small drawings in one line of text: an interval against its limit, a series of nights.

Every character has a look-alike of the same width in ASCII, for streams that cannot encode it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lora_suite.judge.verdict import Effect

BAR_WIDTH = 21
NIGHTS = 30
_LEAST_RATIO = 1e-300
_LEVELS = "▁▂▃▄▅▆▇█"

# One character each, so that tables keep their columns.
_LOOKALIKES = str.maketrans("▁▂▃▄▅▆▇█├─●┤┼│→≥≤…×–−", "_.-~=+*#[-o]+|>><~x--")


def interval_bar(effect: Effect, limit: float, width: int = BAR_WIDTH) -> str:
    """The interval as `├──●──┤` and the limit as `│` (`┼` within it), on an axis that just holds both.

    The axis is logarithmic: there a ratio's interval is symmetric, and a hopelessly wide one still shows.
    """
    shown = (effect.low, effect.estimate, effect.high, limit)
    first, last = _log(min(shown)), _log(max(shown))
    span = last - first

    def cell(value: float) -> int:
        return round((_log(value) - first) / span * (width - 1)) if span > 0 else width // 2

    (low, high), at = sorted((cell(effect.low), cell(effect.high))), cell(limit)
    cells = [" "] * width
    cells[low : high + 1] = "─" * (high - low + 1)
    cells[low], cells[high] = "├", "┤"
    cells[cell(effect.estimate)] = "●"
    cells[at] = "┼" if low < at < high else "│"
    return "".join(cells)


def _log(ratio: float) -> float:
    return math.log(max(ratio, _LEAST_RATIO))


def sparkline(values: Sequence[float]) -> str:
    """The last `NIGHTS` values as bars from the least to the greatest; equal ones are all in the middle."""
    shown = values[-NIGHTS:]
    if not shown:
        return ""
    least, span = min(shown), max(shown) - min(shown)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((value - least) / span * top) if span > 0 else top // 2] for value in shown)


def encodable(encoding: str) -> bool:
    """Whether an encoding has these characters."""
    try:
        (_LEVELS + "├─●┤┼│→≥≤…").encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def in_ascii(text: str) -> str:
    """The text with look-alikes in place of what ASCII lacks; other characters stay as they are."""
    return text.translate(_LOOKALIKES)
