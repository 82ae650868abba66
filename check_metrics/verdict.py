# SPDX-License-Identifier: Apache-2.0
"""The verdict of one check."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from check_metrics.errors import DataError, ExpressionError, MetricsError
from check_metrics.evaluation import Comparison, Evaluator
from check_metrics.series import Series
from check_metrics.syntax import Expression
from check_metrics.text import number_text, percent_text, printable

NARROW_MARGIN_PERCENT = 5.0


@dataclass(frozen=True)
class CheckResult:
    """What became of one check.

    `value` is the side of the first comparison that was held against a limit, the answer itself for a check
    that is one predicate, None where the data did not allow an answer; `message` then says why.
    """

    expression: str
    status: Literal["PASS", "FAIL"]
    value: float | bool | None
    comparisons: tuple[Comparison, ...]
    message: str

    @property
    def margin_percent(self) -> float | None:
        """The smallest margin of the comparisons that decided: those that hold, for a FAIL the others."""
        margins = (each.margin_percent for each in self.comparisons if each.holds == (self.status == "PASS"))
        return min((margin for margin in margins if margin is not None), default=None)

    @property
    def is_narrow(self) -> bool:
        """Whether the check passed with a margin under 5 %, and so may fail by noise tomorrow."""
        margin = self.margin_percent
        return self.status == "PASS" and margin is not None and margin < NARROW_MARGIN_PERCENT


def evaluate(
    expression: Expression,
    arms: Mapping[str, Mapping[str, Series]],
    *,
    segments: Sequence[int] = (),
    warmup: int = 0,
    allow_nonfinite: Collection[str] = (),
) -> CheckResult:
    """Judge a check on the series of its arms.

    `segments`: first step of the run and of each resume; empty where unknown. `warmup`: steps to leave out at
    the start of each segment. `allow_nonfinite`: names or globs of metrics whose non-finite values are left
    out of windows. Data that is missing, empty, damaged or not finite gives FAIL; an arm that was not given
    is an ExpressionError.
    """
    require_arms(expression, arms)
    evaluator = Evaluator(arms, segments, warmup, allow_nonfinite)
    try:
        holds = evaluator.truth(expression.tree)
    except (DataError, MetricsError) as error:
        return CheckResult(expression.text, "FAIL", None, (), printable(str(error)))
    comparisons = tuple(evaluator.comparisons)
    return CheckResult(
        expression.text,
        "PASS" if holds else "FAIL",
        comparisons[0].value if comparisons else holds,
        comparisons,
        printable("; ".join([*_failures(holds, comparisons), *dict.fromkeys(evaluator.notes)])),
    )


def require_arms(expression: Expression, arms: Collection[str]) -> None:
    """ExpressionError naming the first arm of the check that is not among the given ones."""
    for ref in expression.references:
        if ref.arm not in arms:
            known = ", ".join(sorted(arms))
            raise ExpressionError(expression.text, f"no such arm; there are {known}", ref.arm, ref.column)


def comparison_text(comparison: Comparison) -> str:
    """`52.07 < 50`."""
    return f"{number_text(comparison.left)} {comparison.op} {number_text(comparison.right)}"


def _failures(holds: bool, comparisons: Sequence[Comparison]) -> list[str]:
    if holds:
        return []
    if len(comparisons) != 1:
        failed = [comparison_text(each) for each in comparisons if not each.holds]
        return [f"does not hold: {', '.join(failed)}" if failed else "does not hold"]
    margin = comparisons[0].margin_percent
    if margin is None or margin >= 0.0:
        return ["does not hold"]
    return [f"misses its limit by {percent_text(-margin)}"]
