# SPDX-License-Identifier: Apache-2.0
"""A pair check that is a ratio: which values it is computed from, and its verdict on the interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from check_metrics import Expression, PairForm
from check_metrics.series import describe_steps, is_keyed_by_step
from lora_suite.judge.block import Block
from lora_suite.judge.checks import absent_data
from lora_suite.judge.statistics import (
    CONFIDENCE,
    Operator,
    Prior,
    decide,
    detectable_text,
    log_effect,
    median_log_ratio,
)
from lora_suite.judge.steady import NotSteady, Warmup, floor_steps, unsettled_steps, warmup_of
from lora_suite.judge.verdict import Effect, MatchedSteps, PairCheckVerdict

# What depends on how fast a step is, and so on whether the run was warm.
_TIMED = ("timing/", "performance/")


@dataclass(frozen=True)
class Method:
    """How ratios are computed.

    warmup: least number of first steps of each segment that are left out. matched: whether equal steps of the
    arms may be compared; otherwise a ratio is one of medians. priors: by the text of a check, what earlier
    repeats say of its spread. confidence: of the interval.
    """

    warmup: int
    matched: bool = True
    priors: Mapping[str, Prior] = field(default_factory=dict)
    confidence: float = CONFIDENCE

    def prior_of(self, text: str) -> Prior | None:
        """The prior of one check."""
        return self.priors.get(text)


@dataclass(frozen=True)
class Sides:
    """One block's ratio: log(left / right), and the values of both sides by step (or second) that gave it.

    trimmed: both sides' values at the steps that were left out as warm-up. matched: whether the ratio is the
    median over matched steps; otherwise it is one of medians, and nothing is kept in `trimmed`.
    """

    repeat: int
    log_ratio: float
    left: Mapping[int, float]
    right: Mapping[int, float]
    matched: bool
    trimmed: Mapping[int, tuple[float, float]]

    def steps(self) -> MatchedSteps:
        """The same for a report, trimmed steps among the others. Steps must be matched."""
        both = {step: (self.left[step], self.right[step]) for step in self.left} | dict(self.trimmed)
        steps = sorted(both)
        return MatchedSteps(
            repeat=self.repeat,
            steps=steps,
            left=[both[step][0] for step in steps],
            right=[both[step][1] for step in steps],
            trimmed=sorted(self.trimmed),
        )


def judge_ratio(
    expression: Expression, form: PairForm, blocks: Sequence[Block], method: Method
) -> PairCheckVerdict:
    """Judge a ratio on its interval over the blocks: PASS, FAIL, or INCONCLUSIVE with the reason.

    MISSING where a block lacks what it reads. A run that never became steady makes it INCONCLUSIVE; its steps
    are kept for a look at them.
    """
    verdict = PairCheckVerdict(
        expression=expression.text, state="INCONCLUSIVE", operator=form.op, limit=form.limit
    )
    for block in blocks:
        absent = absent_data(expression, block.metrics)
        if absent is not None:
            verdict.state, verdict.message = "MISSING", f"run {block.repeat}: {absent}"
            return verdict
    sides, problems = [], []
    for block in blocks:
        try:
            sides.append(sides_of(form, block, method))
        except ValueError as error:
            problems.append(str(error))
            verdict.matched += _steps_as_seen(form, block, method)
        else:
            verdict.matched += [sides[-1].steps()] if sides[-1].matched else []
    if problems:
        verdict.message = problems[0]
        return verdict
    log_ratios = [each.log_ratio for each in sides]
    if len(log_ratios) < 2:
        verdict.value = f"{math.exp(log_ratios[0]):.4f}"
        verdict.message = "one repeat shows no spread, so there is no interval: run two or more (--repeats)"
        return verdict
    effect = effect_of(log_ratios, method.prior_of(expression.text), method.confidence)
    verdict.effect = effect
    verdict.value = value_text(effect)
    verdict.state = decide(effect, cast(Operator, form.op), form.limit)
    verdict.message = _message(verdict, effect, form)
    return verdict


def effect_of(log_ratios: Sequence[float], prior: Prior | None, confidence: float) -> Effect:
    """The effect of two and more repeats, with the ratio of each."""
    effect = log_effect(log_ratios, prior, confidence).as_ratio()
    effect.ratios = [math.exp(each) for each in log_ratios]
    return effect


def value_text(effect: Effect) -> str:
    """`0.6981 [0.6842, 0.7123]`."""
    return f"{effect.estimate:.4f} [{effect.low:.4f}, {effect.high:.4f}]"


def sides_of(form: PairForm, block: Block, method: Method) -> Sides:
    """One block's values; raises ValueError, naming the block, where its data do not give a ratio."""
    try:
        if all(is_keyed_by_step(name) for _, name in (form.left, form.right)):
            return _by_step(form, block, method)
        # Sampled by the clock: nothing to match, and no step that would be warm-up.
        return _of_medians(form, block, dict.fromkeys(block.arms, Warmup(frozenset())))
    except ValueError as error:
        raise ValueError(f"run {block.repeat}: {error}") from error


def _by_step(form: PairForm, block: Block, method: Method) -> Sides:
    warmups = {arm: _warmup(block, arm, name, method.warmup) for arm, name in (form.left, form.right)}
    if not method.matched:
        return _of_medians(form, block, warmups)
    ours, theirs = _windows(form, block)
    floors = [warmups[arm].floor for arm, _ in (form.left, form.right)]
    lonely = sorted((ours.keys() - floors[0]) ^ (theirs.keys() - floors[1]))
    if lonely:
        raise ValueError(f"only one arm has step {describe_steps(lonely)}")
    # A step that one arm was not warm at is left out of both.
    cut = frozenset[int]().union(*(each.steps for each in warmups.values()))
    cut |= _unlike_steps(form, block, _without(ours, cut), _without(theirs, cut))
    left, right = _without(ours, cut), _without(theirs, cut)
    if not left:
        raise ValueError(_nothing_left(cut))
    trimmed = {step: (ours[step], theirs[step]) for step in ours.keys() & theirs.keys() & cut}
    return Sides(block.repeat, median_log_ratio(left, right), left, right, True, trimmed)


def _steps_as_seen(form: PairForm, block: Block, method: Method) -> list[MatchedSteps]:
    """The steps that both arms have of a block that gives no ratio, for a report to draw.

    Left out is the floor alone: where warm-up ends is what could not be told.
    """
    if not method.matched or not all(is_keyed_by_step(name) for _, name in (form.left, form.right)):
        return []
    left, right = _windows(form, block)
    steps = sorted(
        step for step in left.keys() & right.keys() if _is_positive(left[step]) and _is_positive(right[step])
    )
    floor = floor_steps(block.arms[form.left[0]], method.warmup) | floor_steps(
        block.arms[form.right[0]], method.warmup
    )
    seen = MatchedSteps(
        repeat=block.repeat,
        steps=steps,
        left=[left[step] for step in steps],
        right=[right[step] for step in steps],
        trimmed=[step for step in steps if step in floor],
    )
    return [seen] if steps else []


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _of_medians(form: PairForm, block: Block, warmups: Mapping[str, Warmup]) -> Sides:
    sides, medians = [], []
    for (arm, name), values in zip((form.left, form.right), _windows(form, block), strict=True):
        kept = _without(values, warmups[arm].steps)
        if not kept:
            raise ValueError(_nothing_left(warmups[arm].steps))
        median = statistics.median(kept.values())
        if not _is_positive(median):
            raise ValueError(f"{name} is not positive")
        sides.append(kept)
        medians.append(median)
    return Sides(block.repeat, math.log(medians[0] / medians[1]), sides[0], sides[1], False, {})


def _warmup(block: Block, arm: str, name: str, warmup: int) -> Warmup:
    """What of an arm's run is warm-up for a metric: of times what the run's speed says, else the floor."""
    run = block.arms[arm]
    if not name.startswith(_TIMED):
        return Warmup(floor_steps(run, warmup))
    try:
        return warmup_of(run, warmup)
    except NotSteady as error:
        raise ValueError(f"{arm} is not steady: {error}") from error


def _unlike_steps(
    form: PairForm, block: Block, left: Mapping[int, float], right: Mapping[int, float]
) -> frozenset[int]:
    """Further first steps at which the ratio of two times is not yet what it will be."""
    (left_arm, left_name), (right_arm, right_name) = form.left, form.right
    values = [*left.values(), *right.values()]
    timed = left_name.startswith(_TIMED) and right_name.startswith(_TIMED)
    if not timed or not all(map(_is_positive, values)):
        return frozenset()
    logs = {step: math.log(left[step] / right[step]) for step in left}
    try:
        return unsettled_steps(block.arms[left_arm], logs, either_way=True)
    except NotSteady as error:
        slow, other = (left_arm, right_arm) if error.slower > 0 else (right_arm, left_arm)
        raise ValueError(f"{slow} is not steady against {other}: {error}") from error


def _windows(form: PairForm, block: Block) -> tuple[dict[int, float], dict[int, float]]:
    """Both sides' values in the window of the check. Series sampled by the clock have no such window."""
    left, right = (
        block.arms[arm].window(
            name, *((form.range_start, form.range_end) if is_keyed_by_step(name) else (None, 0))
        )
        for arm, name in (form.left, form.right)
    )
    return left, right


def _without(values: Mapping[int, float], steps: Collection[int]) -> dict[int, float]:
    return {step: value for step, value in values.items() if step not in steps}


def _nothing_left(cut: Collection[int]) -> str:
    return f"no step is left after the first {len(cut)} (warm-up)"


def _message(verdict: PairCheckVerdict, effect: Effect, form: PairForm) -> str:
    limit = f"the limit {form.op} {form.limit:g}"
    if verdict.state == "FAIL":
        return f"{verdict.value} is beyond {limit}"
    if verdict.state == "INCONCLUSIVE":
        seen = detectable_text(effect.smallest_detectable or 0.0)
        return f"{verdict.value} lies across {limit}: more repeats would tell; {seen}"
    return ""
