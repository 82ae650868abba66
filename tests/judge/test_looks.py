# SPDX-License-Identifier: Apache-2.0
"""Looks: the boundaries against an independent integration, and what a look decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lora_suite.judge.looks import confidence_of_look, judge_look
from lora_suite.judge.verdict import Effect, PairCheckVerdict, PairVerdict, State


def boundary(look: int, looks: int) -> float:
    """The normal quantile that a look's confidence stands for."""
    return float(stats.norm.ppf(0.5 + confidence_of_look(look, looks) / 2))


@pytest.mark.parametrize("looks", [1, 2, 3, 4])
def test_equal_arms_are_called_different_at_any_look_with_5_percent(looks):
    """The statistics at equal looks are normal with correlation √(i / j)."""
    correlation = [
        [math.sqrt(min(i, j) / max(i, j)) for j in range(1, looks + 1)] for i in range(1, looks + 1)
    ]
    bounds = np.array([boundary(look, looks) for look in range(1, looks + 1)])
    inside = stats.multivariate_normal(cov=correlation, seed=1).cdf(bounds, lower_limit=-bounds)
    assert 1 - inside == pytest.approx(0.05, abs=2e-4)


def test_one_look_is_the_plain_interval():
    assert confidence_of_look(1, 1) == pytest.approx(0.95, abs=1e-5)


def test_early_looks_ask_for_more():
    confidences = [confidence_of_look(look, 4) for look in range(1, 5)]
    assert confidences == sorted(confidences, reverse=True)
    # z of the first of four is twice that of the last: √(4 / 1).
    assert boundary(1, 4) == pytest.approx(2 * boundary(4, 4))
    assert confidences[-1] == pytest.approx(0.957, abs=1e-3)


@pytest.mark.parametrize(("look", "looks"), [(0, 4), (5, 4), (1, 5), (1, 0)])
def test_what_is_not_planned_is_refused(look, looks):
    with pytest.raises(ValueError, match="there are 1 to 4 looks"):
        confidence_of_look(look, looks)


def pair(*states: State, effect: bool = True, own: State = "PASS") -> PairVerdict:
    """A pair whose checks have these states."""
    seen = Effect(estimate=1, low=0.9, high=1.1, confidence=0.95, repeats=2, smallest_detectable=0.125)
    checks = [
        PairCheckVerdict(expression=str(number), state=state, effect=seen if effect else None)
        for number, state in enumerate(states)
    ]
    order: list[State] = ["ERROR", "MISSING", "FAIL", "INCOMPARABLE", "INCONCLUSIVE", "PASS"]
    return PairVerdict(
        name="fsdp2", arms={}, state=min([own, *states], key=order.index), own_state=own, checks=checks
    )


def test_a_pair_across_its_limit_goes_on():
    look = judge_look(pair("PASS", "INCONCLUSIVE"), 1, 4)
    assert look.state == "go on"
    assert look.message == "fsdp2: 1 of 2 checks lie across their limits at look 1 of 4"


def test_the_last_look_says_what_could_have_been_seen():
    look = judge_look(pair("INCONCLUSIVE"), 4, 4)
    assert look.state == "last"
    assert look.message.endswith("at the last look; smallest detectable effect 12.5 %")


@pytest.mark.parametrize("look", [1, 4])
@pytest.mark.parametrize(
    "verdict",
    [
        pair("PASS", "PASS"),
        pair("FAIL", "INCONCLUSIVE"),
        pair("INCONCLUSIVE", own="MISSING"),
        pair("PASS", own="INCOMPARABLE"),
        pair("INCONCLUSIVE", effect=False),
    ],
    ids=["passed", "failed", "lacking", "incomparable", "no more repeats would help"],
)
def test_what_more_repeats_cannot_change_is_decided(verdict, look):
    assert judge_look(verdict, look, 4).state == "decided"
