# SPDX-License-Identifier: Apache-2.0
"""The tail gate: slow steps that come now and then, which a median hides.

A step in ten that takes three times as long makes a training 20 % slower and leaves the median where it was.
So beside every ratio of step times stands how much more the arm's mean exceeds its median than the other
arm's does, the ratio of the means over the ratio of the medians:

    T_r = log(mean left_i / mean right_i) - D_r

with its interval over the repeats, as for D_r. Each mean is taken without its largest value: one slow step, a
compilation, is no tail. Tails are rare by nature, so the interval is wide on a noisy machine. Therefore the
gate asks for evidence of a tail, not for evidence of none: it FAILs where the whole interval is beyond the
limit, and passes otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

from check_metrics import Expression, ExpressionError, PairForm, parse
from check_metrics.functions import mean_but_largest, spike_limit
from lora_suite.judge.block import Block
from lora_suite.judge.ratio import Method, Sides, effect_of, sides_of, value_text
from lora_suite.judge.statistics import Operator, decide
from lora_suite.judge.verdict import PairCheckVerdict
from lora_suite.plan.equal_steps import TAIL
from lora_suite.plan.metric_names import STEP_TIME

# Half of real runs have a mean 1 % above their median, nine in ten less than 8 % (Megatron-LM's golden runs);
# between two arms on one machine most of that cancels.
DEFAULT_LIMIT = 1.05
_FEWEST_SPIKES = 3


def tail_checks(checks: Sequence[str]) -> list[str]:
    """The tail gate of each ratio of step times among a pair's checks that has no tail check of its own.

    A ratio that must stay below a limit is about its left arm, one that must stay above about its right.
    """
    forms = [form for form in map(_form, checks) if form is not None]
    own = {frozenset((form.left[0], form.right[0])) for form in forms if form.function == TAIL}
    return list(dict.fromkeys(_gates(forms, own)))


def judge_tail(
    expression: Expression, form: PairForm, blocks: Sequence[Block], method: Method
) -> PairCheckVerdict:
    """Judge a tail: FAIL where the whole interval is beyond the limit, else PASS.

    INCONCLUSIVE where there is no interval: a single repeat, or a repeat whose data do not give a ratio.
    """
    verdict = PairCheckVerdict(
        expression=expression.text, state="INCONCLUSIVE", operator=form.op, limit=form.limit
    )
    try:
        sides = [sides_of(form, block, method) for block in blocks]
        log_tails = [_log_tail(each) for each in sides]
    except ValueError as error:
        verdict.message = str(error)
        return verdict
    if len(sides) < 2:
        verdict.message = "one repeat shows no spread, so there is no interval: run two or more (--repeats)"
        return verdict
    effect = effect_of(log_tails, method.prior_of(expression.text), method.confidence)
    verdict.effect = effect
    verdict.value = value_text(effect)
    verdict.state = "PASS"
    if decide(effect, cast(Operator, form.op), form.limit) == "FAIL":
        verdict.state = "FAIL"
        verdict.message = (
            f"{verdict.value} is beyond the limit {form.op} {form.limit:g}: slow steps that the median hides "
            f"({_described(form, sides)})"
        )
    return verdict


def _form(text: str) -> PairForm | None:
    try:
        return parse(text).pair
    except ExpressionError:
        # The check itself says what is wrong with it.
        return None


def _gates(forms: Sequence[PairForm], own: set[frozenset[str]]) -> Iterator[str]:
    for form in forms:
        (left, left_name), (right, right_name) = form.left, form.right
        if form.function != "ratio" or {left_name, right_name} != {STEP_TIME} or {left, right} in own:
            continue
        if form.op in (">", ">="):
            left, right = right, left
        elif form.op not in ("<", "<="):
            continue
        yield f'{TAIL}({left}["{STEP_TIME}"], {right}["{STEP_TIME}"]) < {DEFAULT_LIMIT:g}'


def _log_tail(sides: Sides) -> float:
    left, right = list(sides.left.values()), list(sides.right.values())
    if min(len(left), len(right)) < 2:
        raise ValueError(f"run {sides.repeat}: one step is no tail")
    return math.log(mean_but_largest(left) / mean_but_largest(right)) - sides.log_ratio


def _described(form: PairForm, sides: Sequence[Sides]) -> str:
    """How many steps of each arm are slow, and how regularly they come."""
    said = []
    for (arm, _), all_values in (
        (form.left, [each.left for each in sides]),
        (form.right, [each.right for each in sides]),
    ):
        slow = [_spikes(values) for values in all_values]
        share = sum(map(len, slow)) / sum(map(len, all_values))
        said.append(f"{arm}: {100 * share:.0f} % of the steps{_period(slow)}")
    return ", ".join(said)


def _spikes(values: Mapping[int, float]) -> list[int]:
    limit = spike_limit(list(values.values()))
    return [step for step, value in values.items() if value > limit]


def _period(slow: Sequence[Sequence[int]]) -> str:
    """`, one in 10`, where the slow steps of all runs come at one distance."""
    gaps = {after - before for steps in slow for before, after in pairwise(steps)}
    if len(gaps) != 1 or min(map(len, slow)) < _FEWEST_SPIKES:
        return ""
    return f", one in {gaps.pop()}"
