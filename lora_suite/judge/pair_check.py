# SPDX-License-Identifier: Apache-2.0
"""One check of a pair over its blocks: a ratio on its confidence interval, all else on the worst block."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from check_metrics import Expression, ExpressionError, PairForm, Series, parse
from check_metrics.series import describe_steps, is_keyed_by_step
from check_metrics.syntax import Call, walk
from check_metrics.verdict import require_arms
from lora_suite.judge.block import Block
from lora_suite.judge.checks import Answer, absent_data, answer
from lora_suite.judge.statistics import CONFIDENCE, Operator, Prior, decide, log_effect, median_log_ratio
from lora_suite.judge.verdict import Effect, PairCheckVerdict

_RATIO = "ratio"
_ORDERED = frozenset({"<", "<=", ">", ">="})


def judge_pair_check(
    text: str,
    blocks: Sequence[Block],
    warmup: int,
    matched: bool = True,
    prior: Prior | None = None,
    confidence: float = CONFIDENCE,
) -> PairCheckVerdict:
    """Judge one pair check on at least one block.

    warmup: first steps of each segment that are left out. matched: whether equal steps of the arms may be
    compared; otherwise a ratio is one of medians, and a check that needs equal steps is INCOMPARABLE. Data
    that a block lacks make the check MISSING. prior, confidence: of a ratio's interval.
    """
    try:
        expression = parse(text)
        form = expression.pair
        if form is not None and form.function == _RATIO and form.op in _ORDERED:
            require_arms(expression, blocks[0].arms)
            return _judged_ratio(expression, form, blocks, warmup, matched, prior, confidence)
        if not matched and any(
            isinstance(node, Call) and len(node.series) > 1 for node in walk(expression.tree)
        ):
            message = "it compares equal steps, and what the arms saw at a step is not known"
            return PairCheckVerdict(expression=text, state="INCOMPARABLE", message=message)
        return _judged_by_block(expression, form, blocks)
    except ExpressionError as error:
        return PairCheckVerdict(expression=text, state="ERROR", message=str(error))


def _judged_ratio(
    expression: Expression,
    form: PairForm,
    blocks: Sequence[Block],
    warmup: int,
    matched: bool,
    prior: Prior | None,
    confidence: float,
) -> PairCheckVerdict:
    verdict = PairCheckVerdict(
        expression=expression.text, state="INCONCLUSIVE", operator=form.op, limit=form.limit
    )
    log_ratios = []
    for block in blocks:
        absent = absent_data(expression, _metrics(block))
        if absent is not None:
            verdict.state, verdict.message = "MISSING", f"run {block.repeat}: {absent}"
            return verdict
        try:
            log_ratios.append(_log_ratio(form, block, warmup, matched))
        except ValueError as error:
            verdict.message = f"run {block.repeat}: {error}"
            return verdict
    if len(log_ratios) < 2:
        verdict.value = f"{math.exp(log_ratios[0]):.4f}"
        verdict.message = "one repeat shows no spread, so there is no interval: run two or more (--repeats)"
        return verdict
    effect = log_effect(log_ratios, prior, confidence).as_ratio()
    verdict.effect = effect
    verdict.value = f"{effect.estimate:.4f} [{effect.low:.4f}, {effect.high:.4f}]"
    verdict.state = decide(effect, cast(Operator, form.op), form.limit)
    verdict.message = _ratio_message(verdict, effect, form)
    return verdict


def _log_ratio(form: PairForm, block: Block, warmup: int, matched: bool) -> float:
    """log(left / right) of one block; raises ValueError where the data do not give one."""
    (left_arm, left_name), (right_arm, right_name) = form.left, form.right
    left, right = block.arms[left_arm], block.arms[right_arm]
    if not (is_keyed_by_step(left_name) and is_keyed_by_step(right_name)):
        # Sampled by the clock: nothing to match, so typical value over typical value.
        values = left.metrics[left_name].values, right.metrics[right_name].values
        return math.log(_typical(left_name, values[0]) / _typical(right_name, values[1]))
    ours = left.measured(left_name, warmup, form.range_start, form.range_end)
    theirs = right.measured(right_name, warmup, form.range_start, form.range_end)
    lonely = sorted(ours.keys() ^ theirs.keys())
    if lonely and matched:
        raise ValueError(f"only one arm has step {describe_steps(lonely)}")
    if not (ours and theirs):
        raise ValueError(f"no step is left after the first {warmup} (warm-up)")
    if not matched:
        return math.log(_typical(left_name, ours.values()) / _typical(right_name, theirs.values()))
    return median_log_ratio(ours, theirs)


def _typical(name: str, values: Iterable[float]) -> float:
    value = statistics.median(values)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is not positive")
    return value


def _ratio_message(verdict: PairCheckVerdict, effect: Effect, form: PairForm) -> str:
    limit = f"the limit {form.op} {form.limit:g}"
    if verdict.state == "FAIL":
        return f"{verdict.value} is beyond {limit}"
    if verdict.state == "INCONCLUSIVE":
        seen = f"; smallest detectable effect {100 * (effect.smallest_detectable or 0):.1f} %"
        return f"{verdict.value} lies across {limit}: more repeats would tell{seen}"
    return ""


def _judged_by_block(
    expression: Expression, form: PairForm | None, blocks: Sequence[Block]
) -> PairCheckVerdict:
    """Evaluate the check on every block, warm-up included; the block with the worst answer decides."""
    answers = [(block.repeat, _answer(expression, block)) for block in blocks]
    repeat, said = min(answers, key=lambda each: _badness(each[1]))
    message = f"run {repeat}: {said.message}" if said.message else ""
    if said.state == "PASS" and len(blocks) > 1:
        message = f"nearest to the limit in run {repeat}"
    return PairCheckVerdict(
        expression=expression.text,
        state=said.state,
        value=said.value,
        operator=form.op if form is not None else "",
        limit=form.limit if form is not None else None,
        message=message,
    )


def _answer(expression: Expression, block: Block) -> Answer:
    segments = sorted({start for run in block.arms.values() for start in run.record.segments})
    return answer(expression, _metrics(block), segments)


def _metrics(block: Block) -> dict[str, Mapping[str, Series]]:
    return {arm: run.metrics for arm, run in block.arms.items()}


def _badness(said: Answer) -> tuple[int, float]:
    """Ascending from the worst: by state, then by margin; a failed check without a margin is worst."""
    unknown = math.inf if said.state == "PASS" else -math.inf
    order = ("MISSING", "FAIL", "PASS").index(said.state)
    return order, said.margin_percent if said.margin_percent is not None else unknown
