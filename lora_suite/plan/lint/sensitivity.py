# SPDX-License-Identifier: Apache-2.0
"""Whether a check can fail at all, found by trying.

The check is evaluated on synthetic series whose values lie around its own numbers and at the ends of what the
metric can be, in several shapes, and on runs that are cut short. If none of that turns it red, no training
ever will. That NaN and an empty series turn every check red is a property of the language itself.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from check_metrics import CheckResult, Expression, Series, evaluate
from check_metrics.syntax import Constant, walk
from lora_suite.plan.metric_names import known

Key = tuple[str, str]
Shape = Callable[[float, int, int], float]

MOST_TRIALS = 600
_FEWEST_STEPS = 12
_AROUND = (0.5, 0.99, 1.01, 2.0)
_FAR = (0.0, 1e-9, 1.0, 1e9)
_NEVER_NEGATIVE = re.compile(
    r"loss|norm|time|sec|mem|tok|util|(?:^|[/_])(?:num|count|lr|n)(?:$|[/_])|samples|seqs"
)
# Values of a series of `count` steps around a level: level, up, down, a last step that stands out, and one in
# three that does.
_SHAPES: tuple[Shape, ...] = (
    lambda level, index, count: level,
    lambda level, index, count: level * (1 + index) / count,
    lambda level, index, count: level * (count - index) / count,
    lambda level, index, count: level * (0.1 if index < count - 1 else 1.0),
    lambda level, index, count: level * (0.01 if index % 3 else 1.0),
)


def can_fail(expression: Expression, steps: int) -> bool:
    """Whether some possible run of `steps` steps fails the check by its values or by its length."""
    count = max(expression.max_step, min(steps, _FEWEST_STEPS))
    if "all_finite" in expression.functions:
        return True
    whole = _trials(expression, count)
    short = (_constant(expression, 1.0, length) for length in {count - 1, count // 2, 1} if length > 0)
    return any(_is_red(evaluate(expression, arms)) for arms in itertools.chain(short, whole))


def _is_red(result: CheckResult) -> bool:
    """Whether a comparison failed, rather than that there was nothing to compare."""
    return result.status == "FAIL" and result.value is not None


def _trials(expression: Expression, count: int) -> Iterator[Mapping[str, Mapping[str, Series]]]:
    """Yield synthetic runs: all of them if they are few, a fixed random choice among them otherwise."""
    keys = sorted(expression.metrics)
    choices = [list(itertools.product(_levels(expression, metric), _SHAPES)) for _, metric in keys]
    if math.prod(len(each) for each in choices) <= MOST_TRIALS:
        picks: Iterable[Sequence[tuple[float, Shape]]] = itertools.product(*choices)
    else:
        chance = random.Random(0)
        picks = ([chance.choice(each) for each in choices] for _ in range(MOST_TRIALS))
    for pick in picks:
        yield _runs(
            {
                key: [shape(level, at, count) for at in range(count)]
                for key, (level, shape) in zip(keys, pick, strict=True)
            }
        )


def _levels(expression: Expression, metric: str) -> list[float]:
    """Values to try for a metric, none outside what it can be.

    No metric of ours is negative; one that is not known can be, unless its name is that of a count or size.
    """
    entry = known(_instance(metric))
    high = entry.high if entry is not None and entry.high is not None else math.inf
    numbers = {abs(node.value) for node in walk(expression.tree) if isinstance(node, Constant)}
    near = {number * factor for number in numbers for factor in _AROUND}
    levels = {min(level, high) for level in near.union(_FAR)}
    if entry is None and not _NEVER_NEGATIVE.search(metric):
        levels |= {-level for level in levels}
    return sorted(levels)


def _constant(expression: Expression, level: float, count: int) -> Mapping[str, Mapping[str, Series]]:
    """Runs of `count` steps whose series all have one value."""
    return _runs({key: [level] * count for key in expression.metrics})


def _runs(values: Mapping[Key, Sequence[float]]) -> Mapping[str, Mapping[str, Series]]:
    """Series by arm and metric."""
    arms: dict[str, dict[str, Series]] = {}
    for (arm, metric), numbers in values.items():
        name = _instance(metric)
        steps = tuple(range(1, len(numbers) + 1))
        arms.setdefault(arm, {})[name] = Series(name, steps, tuple(numbers))
    return arms


def _instance(metric: str) -> str:
    """A metric's name; of a pattern one name that matches it."""
    return metric.replace("*", "0").replace("?", "0")
