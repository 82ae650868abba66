# SPDX-License-Identifier: Apache-2.0
"""Which arm moved: tonight's pair against a reference, by the double ratio.

A LoRA/full ratio gets worse if LoRA becomes slower, and as well if full SFT becomes faster. So three changes
against the reference are looked at: each arm's own, and that of their ratio,

    DR = (lora / full tonight) / (lora / full of the reference)

in which whatever both arms share cancels: host, driver, container, and the batches. The double ratio is taken
over interleaved repeats, so it is the sharpest of the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from lora_suite.judge.statistics import Prior, log_difference, moved
from lora_suite.judge.verdict import Attribution, Effect

SMALLEST_CHANGE = 0.01
DOUBLE_RATIO = "double ratio"

Moved = Literal["lora-only", "shared", "full-only", "none", "unclear"]


def attribute(
    tonight: Mapping[str, Sequence[float]],
    reference: Mapping[str, Sequence[float]],
    *,
    lora: str,
    full: str,
    source: str,
    minimum: float = SMALLEST_CHANGE,
    priors: Mapping[str, Prior] | None = None,
) -> Attribution:
    """Say which arm moved against the reference.

    tonight, reference: by arm, the logarithm of each repeat's step time; the k-th of both arms ran together.
    lora, full: names of the arms. source: what the reference is, for people. minimum: the smallest change
    that counts. priors: of an arm's run-to-run spread (by its name) and of a repeat's log ratio (by
    `DOUBLE_RATIO`). Raises ValueError where an arm is lacking, its repeats are not as many as the other's, or
    there are fewer than three in all.
    """
    known = priors or {}
    changes = {
        arm: log_difference(_of(tonight, arm), _of(reference, arm), known.get(arm)).as_ratio()
        for arm in (full, lora)
    }
    double = log_difference(
        _log_ratios(tonight, lora, full), _log_ratios(reference, lora, full), known.get(DOUBLE_RATIO)
    ).as_ratio()
    verdict, why = _classified(changes[lora], changes[full], double, minimum)
    said = ", ".join(
        f"{name} {_percent(effect)}"
        for name, effect in ((lora, changes[lora]), (full, changes[full]), (DOUBLE_RATIO, double))
    )
    return Attribution(
        moved=verdict, reference=source, changes=changes, double_ratio=double, message=f"{why}: {said}"
    )


def _classified(lora: Effect, full: Effect, double: Effect, minimum: float) -> tuple[Moved, str]:
    ours, theirs, between = (moved(effect, minimum) for effect in (lora, full, double))
    if between != "no":
        if ours == between and theirs == "no":
            return "lora-only", f"only LoRA moved: it is {ours}"
        if theirs not in ("no", between) and ours == "no":
            return "full-only", f"only full SFT moved: it is {theirs}"
        if "no" not in (ours, theirs):
            return "unclear", "both arms moved, and not alike"
        return "unclear", "the ratio moved, and neither arm clearly alone"
    if ours == theirs != "no":
        return "shared", f"both arms are {ours} alike"
    if ours == theirs and all(_narrow(effect, minimum) for effect in (lora, full, double)):
        return "none", "nothing moved"
    if ours == theirs:
        return "unclear", f"runs scatter too much to see {100 * minimum:g} %"
    return "unclear", "one arm moved, and the ratio doesn't show it"


def _narrow(effect: Effect, minimum: float) -> bool:
    """Whether the interval is no wider than the change that counts, to either side."""
    return effect.high / effect.estimate - 1.0 <= minimum


def _log_ratios(arms: Mapping[str, Sequence[float]], lora: str, full: str) -> list[float]:
    ours, theirs = _of(arms, lora), _of(arms, full)
    if len(ours) != len(theirs):
        raise ValueError(f"{lora} has {len(ours)} repeats, {full} has {len(theirs)}")
    return [left - right for left, right in zip(ours, theirs, strict=True)]


def _of(arms: Mapping[str, Sequence[float]], arm: str) -> Sequence[float]:
    if arm not in arms:
        raise ValueError(f"there is no arm {arm}; there are {', '.join(sorted(arms))}")
    return arms[arm]


def _percent(effect: Effect) -> str:
    low, middle, high = (100 * (each - 1) for each in (effect.low, effect.estimate, effect.high))
    return f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"
