# SPDX-License-Identifier: Apache-2.0
"""One line of the table that the selftest prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One requirement and what was measured.

    what: the situation. required: the requirement, as text. measured: the figure, as text. notes: its exact
    interval, seeds, what else is worth knowing. ok: whether it is met; None where it was not measured, with
    the reason in `notes`.
    """

    what: str
    required: str
    measured: str
    notes: str
    ok: bool | None


def binomial_interval(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a share: Clopper and Pearson, Biometrika 26, 1934. Needs at least one trial."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return low, high


def share_row(what: str, required: str, hits: int, trials: int, holds: Callable[[float], bool]) -> Row:
    """A row whose figure is a share of trials; `holds` judges the share itself."""
    low, high = binomial_interval(hits, trials)
    share = hits / trials
    return Row(
        what,
        required,
        f"{100 * share:.2f} %",
        f"{hits} of {trials}, 95 % interval {100 * low:.2f} to {100 * high:.2f} %",
        holds(share),
    )
