# SPDX-License-Identifier: Apache-2.0
"""One check of a pair over its blocks: a ratio on its confidence interval, all else on the worst block."""

from __future__ import annotations

import math
from collections.abc import Sequence

from check_metrics import Expression, ExpressionError, PairForm, parse
from check_metrics.verdict import require_arms
from lora_suite.judge.block import Block
from lora_suite.judge.checks import Answer, answer
from lora_suite.judge.ratio import Method, judge_ratio
from lora_suite.judge.tail import judge_tail
from lora_suite.judge.verdict import PairCheckVerdict
from lora_suite.plan.equal_steps import ORDERED, RATIO, TAIL, needs_equal_steps


def judge_pair_check(text: str, blocks: Sequence[Block], method: Method) -> PairCheckVerdict:
    """Judge one pair check on at least one block.

    A ratio and a tail are judged on their interval. Everything else is judged on each block, warm-up
    included. A check that needs equal steps is INCOMPARABLE where the arms' steps are not matched; data that
    a block lacks make the check MISSING.
    """
    try:
        expression = parse(text)
        require_arms(expression, blocks[0].arms)
        form = expression.pair
        if form is not None and form.op in ORDERED:
            if form.function == RATIO:
                return judge_ratio(expression, form, blocks, method)
            if form.function == TAIL:
                return judge_tail(expression, form, blocks, method)
        if not method.matched and needs_equal_steps(expression):
            message = "it compares equal steps, and what the arms saw at a step is not known"
            return PairCheckVerdict(expression=text, state="INCOMPARABLE", message=message)
        return _judged_by_block(expression, form, blocks)
    except ExpressionError as error:
        return PairCheckVerdict(expression=text, state="ERROR", message=str(error))


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
    return answer(expression, block.metrics, segments)


def _badness(said: Answer) -> tuple[int, float]:
    """Ascending from the worst: by state, then by margin; a failed check without a margin is worst."""
    unknown = math.inf if said.state == "PASS" else -math.inf
    order = ("MISSING", "FAIL", "PASS").index(said.state)
    return order, said.margin_percent if said.margin_percent is not None else unknown
