# SPDX-License-Identifier: Apache-2.0
"""Which checks of a pair ask that its arms did the same at each step."""

from __future__ import annotations

from check_metrics import Expression
from check_metrics.functions import FUNCTIONS
from check_metrics.syntax import Call, Node, walk

ORDERED = frozenset({"<", "<=", ">", ">="})
RATIO, TAIL = "ratio", "tail_ratio"


def needs_equal_steps(expression: Expression) -> bool:
    """Whether a check compares two series step by step.

    A ratio or tail against a limit does not: where steps are not matched it is that of whole runs.
    """
    form = expression.pair
    if form is not None and form.op in ORDERED and form.function in (RATIO, TAIL):
        return False
    return any(_compares_steps(node) for node in walk(expression.tree))


def _compares_steps(node: Node) -> bool:
    if not isinstance(node, Call):
        return False
    function = FUNCTIONS[node.function]
    return function.series > 1 and function.matched
