# SPDX-License-Identifier: Apache-2.0
"""Figures as reports print them."""

from __future__ import annotations

from typing import Literal

from lora_suite.judge.verdict import Effect, State, SuiteVerdict, worst

# A change so large that its size says no more.
_MUCH = 10.0


def change_text(effect: Effect) -> str:
    """A ratio as a change with its interval: `+3.1 % [+2.6, +3.6]`."""
    low, high = (f"{100 * (value - 1):+.1f}" for value in (effect.low, effect.high))
    return f"{100 * (effect.estimate - 1):+.1f} % [{low}, {high}]"


def signed(value: float) -> str:
    """A difference in four significant digits at most, with its sign."""
    return f"{value:+.3g}"


def figure(value: float) -> str:
    """A number as reports print it."""
    return f"{value:.4g}"


def unit(metric: str) -> str:
    """The unit of a metric, empty where its name does not tell."""
    if metric.startswith("timing/"):
        return "s"
    if metric.startswith(("memory/", "ray/")):
        return "GiB"
    return ""


def duration(seconds: float) -> str:
    """Seconds as people say them: `3 min 12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def count(number: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interval(effect: Effect) -> str:
    """`[0.880, 0.985]`."""
    return f"[{effect.low:.3f}, {effect.high:.3f}]"


def detects(smallest: float | None) -> str:
    """The smallest change that could have been seen: `≥ 1.4 %`; one so large that its size says no more is
    `> 1000 %`."""
    if smallest is None:
        return "-"
    return f"≥ {100 * smallest:.1f} %" if smallest < _MUCH else f"> {100 * _MUCH:.0f} %"


def over_floor(seconds: float | None, floor: float | None, term: str) -> str:
    """A step as a multiple of its floor, and the floor's term: `2.2 arithmetic`; `-` without a floor."""
    if not seconds or not floor:
        return "-"
    return f"{seconds / floor:.3g} {term}".strip()


def shortened(value: str) -> str:
    """A value in a table's width; what is no number stays as it is."""
    try:
        return f"{float(value):.3g}"
    except ValueError:
        return value or "-"


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, within one line."""
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#~" else character for character in text)


def outcome(verdict: SuiteVerdict) -> State | Literal["INTERRUPTED"]:
    """The one word for a whole suite; where nothing was planned, that is MISSING."""
    if verdict.interrupted:
        return "INTERRUPTED"
    return worst(verdict.states) if verdict.states else "MISSING"
