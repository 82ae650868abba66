# SPDX-License-Identifier: Apache-2.0
"""How sure a look at a pair must be while it runs, and when to stop. When to look: `lora_suite.plan.order`.

A stable pair is decided after two pairs of runs, a noisy one needs more. Whoever looks several times and
stops at the first clear answer is wrong more often than 5 %: so an early look asks for more certainty, after
O'Brien and Fleming, "A multiple testing procedure for clinical trials", Biometrics 35, 1979. At look k of K
the interval's normal quantile is

    z_k = C_K · √(K / k)

with C_K such that equal arms are called different at any look with 5 % (Jennison and Turnbull, "Group
Sequential Methods with Applications to Clinical Trials", 2000, table 2.3). The interval then uses Student's t
at the same confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from lora_suite.judge.statistics import detectable_text
from lora_suite.judge.verdict import PairVerdict

# C_K by the number of looks K, for two-sided 5 %.
_OBRIEN_FLEMING = {1: 1.9600, 2: 1.9774, 3: 2.0041, 4: 2.0243}


@dataclass(frozen=True)
class Look:
    """What a look says. state: `decided`, `go on`, or `last` where no look is left and nothing is decided."""

    state: Literal["decided", "go on", "last"]
    message: str


def confidence_of_look(look: int, looks: int) -> float:
    """Confidence of the interval at the `look`-th (from 1) of `looks` looks; the single look has 0.95.

    Raises ValueError for a look that is not planned, and for more than four looks.
    """
    if looks not in _OBRIEN_FLEMING or not 1 <= look <= looks:
        raise ValueError(f"look {look} of {looks}: there are 1 to {max(_OBRIEN_FLEMING)} looks")
    quantile = _OBRIEN_FLEMING[looks] * math.sqrt(looks / look)
    return 2 * NormalDist().cdf(quantile) - 1


def judge_look(pair: PairVerdict, look: int, looks: int) -> Look:
    """Whether a pair, judged with `confidence_of_look(look, looks)`, needs more pairs of runs.

    Only an interval that lies across its limit can be helped by more of them. A pair that fails, lacks a run
    or cannot be compared is decided, whatever its other checks say.
    """
    open_checks = [
        check for check in pair.checks if check.state == "INCONCLUSIVE" and check.effect is not None
    ]
    if pair.state != "INCONCLUSIVE" or not open_checks:
        return Look("decided", f"{pair.name} is {pair.state} at look {look} of {looks}")
    seen = max(each.effect.smallest_detectable or 0.0 for each in open_checks if each.effect is not None)
    undecided = f"{pair.name}: {len(open_checks)} of {len(pair.checks)} checks lie across their limits"
    if look < looks:
        return Look("go on", f"{undecided} at look {look} of {looks}")
    return Look("last", f"{undecided} at the last look; {detectable_text(seen)}")
