# SPDX-License-Identifier: Apache-2.0
"""Which arm moved: by hand, against scipy, and what must cancel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from scipy import stats

from lora_suite.judge.attribution import attribute
from lora_suite.judge.statistics import Prior
from lora_suite.judge.verdict import Attribution

NOISE = (0.0, 0.001, -0.001, 0.0005)
OTHER = (0.0007, -0.0004, 0.0002, -0.0006)


def arms(lora: float = 0.0, full: float = 0.0, noise: Sequence[float] = NOISE) -> dict[str, list[float]]:
    """Logs of the step times of four repeats, LoRA at 70 % of full; shares planted in each arm."""
    return {
        "full": [math.log1p(full) + each for each in noise],
        "lora": [math.log(0.7) + math.log1p(lora) + each for each in OTHER],
    }


def said(
    tonight: dict[str, list[float]], reference: dict[str, list[float]] | None = None, **options
) -> Attribution:
    """What is said of tonight."""
    return attribute(
        tonight,
        arms(noise=NOISE[::-1]) if reference is None else reference,
        lora="lora",
        full="full",
        source="last week",
        **options,
    )


@pytest.mark.parametrize(
    ("lora", "full", "moved", "words"),
    [
        (0.03, 0.0, "lora-only", "only LoRA moved: it is slower"),
        (-0.03, 0.0, "lora-only", "only LoRA moved: it is faster"),
        (0.03, 0.03, "shared", "both arms are slower alike"),
        (-0.03, -0.03, "shared", "both arms are faster alike"),
        (0.0, -0.03, "full-only", "only full SFT moved: it is faster"),
        (0.0, 0.03, "full-only", "only full SFT moved: it is slower"),
        (0.0, 0.0, "none", "nothing moved"),
        (0.002, 0.0, "none", "nothing moved"),
        (0.06, 0.03, "unclear", "both arms moved, and not alike"),
        (0.03, -0.03, "unclear", "both arms moved, and not alike"),
        (0.0065, -0.0065, "unclear", "the ratio moved, and neither arm clearly alone"),
        (0.012, 0.006, "unclear", "one arm moved, and the ratio doesn't show it"),
    ],
)
def test_what_moved(lora, full, moved, words):
    found = said(arms(lora, full))
    assert found.moved == moved
    assert found.message.startswith(words)
    assert found.reference == "last week"


def test_the_effects_are_scipys():
    tonight, reference = arms(0.03, 0.01), arms(noise=NOISE[::-1])
    found = said(tonight, reference)
    ratios = [
        [a - b for a, b in zip(each["lora"], each["full"], strict=True)] for each in (tonight, reference)
    ]
    for effect, left, right in (
        (found.changes["lora"], tonight["lora"], reference["lora"]),
        (found.changes["full"], tonight["full"], reference["full"]),
        (found.double_ratio, *ratios),
    ):
        theirs = stats.ttest_ind(left, right).confidence_interval(0.95)
        assert effect is not None
        assert (effect.low, effect.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)))


def test_what_both_arms_share_leaves_the_double_ratio_alone():
    plain = said(arms(0.03)).double_ratio
    node = [0.2, -0.1, 0.05, 0.3]
    scattered = {arm: [a + b for a, b in zip(logs, node, strict=True)] for arm, logs in arms(0.03).items()}
    shared = said(scattered)
    assert plain is not None
    assert shared.double_ratio is not None
    assert shared.double_ratio.estimate == pytest.approx(plain.estimate)
    assert shared.double_ratio.high == pytest.approx(plain.high)
    # The arms themselves scatter by the node, so that neither is clearly the one.
    assert shared.moved == "unclear"


def test_runs_that_scatter_are_unclear_rather_than_none():
    wide = {arm: [each * 30 for each in logs] for arm, logs in arms().items()}
    found = said(wide, {arm: [each * 30 for each in logs] for arm, logs in arms(noise=NOISE[::-1]).items()})
    assert found.moved == "unclear"
    assert "scatter too much to see 1 %" in found.message


def test_a_prior_makes_few_repeats_enough():
    few = {arm: logs[:2] for arm, logs in arms(0.03).items()}
    before = {arm: logs[:2] for arm, logs in arms(noise=NOISE[::-1]).items()}
    priors = {name: Prior(0.001, 12, "nights") for name in ("lora", "full", "double ratio")}
    assert said(few, before, priors=priors).moved == "lora-only"


@pytest.mark.parametrize(
    ("tonight", "words"),
    [
        ({"lora": [0.0, 0.1]}, "no arm full; there are lora"),
        ({"lora": [0.0], "full": [0.0, 0.1]}, "lora has 1 repeats, full has 2"),
        ({"lora": [], "full": []}, "a value on each side"),
    ],
)
def test_what_cannot_be_compared_is_refused(tonight, words):
    with pytest.raises(ValueError, match=words):
        said(tonight)
