# SPDX-License-Identifier: Apache-2.0
"""The allow-listed syntax tree of a check, and what can be read off it without any data."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from check_metrics.functions import FUNCTIONS
from check_metrics.series import is_keyed_by_step


@dataclass(frozen=True)
class SeriesRef:
    """`arm["metric"]`; inside `worst` the metric is a glob. `column` is where the arm stands in the text."""

    arm: str
    metric: str
    column: int

    def __str__(self) -> str:
        return f'{self.arm}["{self.metric}"]'


@dataclass(frozen=True)
class Constant:
    """A number, or arithmetic on numbers alone."""

    value: float


@dataclass(frozen=True)
class StepValue:
    """`arm["metric"]["step"]`."""

    series: SeriesRef
    step: int


@dataclass(frozen=True)
class Window:
    """Steps of a series, as `Series.bounds` reads its ends; `names_start`: the check gives the start."""

    start: int | None
    end: int
    names_start: bool

    @property
    def is_closed(self) -> bool:
        """Whether both ends are named as steps, so that every step between them must be there."""
        return self.names_start and (self.start or 0) > 0 and self.end > 0


@dataclass(frozen=True)
class Call:
    """A listed function on the windows of one or two series; `argument` is its own parameter, if any."""

    function: str
    series: tuple[SeriesRef, ...]
    window: Window
    argument: "Number | None"


@dataclass(frozen=True)
class Worst:
    """Highest (or lowest) value of every series that matches the glob `series.metric`."""

    series: SeriesRef
    window: Window
    highest: bool


@dataclass(frozen=True)
class Arithmetic:
    """`left op right`."""

    op: str
    left: "Number"
    right: "Number"


@dataclass(frozen=True)
class Negative:
    """`-operand`."""

    operand: "Number"


@dataclass(frozen=True)
class Absolute:
    """`abs(operand)`."""

    operand: "Number"


@dataclass(frozen=True)
class Extremum:
    """`max(operands)` or `min(operands)` of plain numbers."""

    highest: bool
    operands: tuple["Number", ...]


@dataclass(frozen=True)
class Compare:
    """One `left op right`; a chain is a Junction of them."""

    op: str
    left: "Number"
    right: "Number"


@dataclass(frozen=True)
class Predicate:
    """`all_finite(…)`, which is its own verdict."""

    call: Call


@dataclass(frozen=True)
class Contains:
    """`"step" in arm["metric"]`: the step has a value."""

    series: SeriesRef
    step: int


@dataclass(frozen=True)
class Not:
    """`not operand`."""

    operand: "Truth"


@dataclass(frozen=True)
class Junction:
    """`and` (conjunction) or `or` of the operands, all of which are evaluated."""

    conjunction: bool
    operands: tuple["Truth", ...]


Number = Constant | StepValue | Call | Worst | Arithmetic | Negative | Absolute | Extremum
Truth = Compare | Predicate | Contains | Not | Junction
Node = Number | Truth


@dataclass(frozen=True)
class PairForm:
    """A check that is one comparison of one function of two arms with a number; `op` has the value on its
    left.

    `range_start` and `range_end` are the window of both series, as `Series.bounds` reads them.
    """

    function: str
    left: tuple[str, str]
    right: tuple[str, str]
    op: str
    limit: float
    range_start: int | None = None
    range_end: int = 0


@dataclass(frozen=True)
class Expression:
    """A parsed check. Everything but `text` and `tree` is read off the tree."""

    text: str
    tree: Truth

    @cached_property
    def arms(self) -> frozenset[str]:
        """Names of the runs that are read, `{"data"}` for most checks."""
        return frozenset(ref.arm for ref in self.references)

    @cached_property
    def metrics(self) -> frozenset[tuple[str, str]]:
        """(arm, metric) of every series that is read; the metric of a `worst` is a glob."""
        return frozenset((ref.arm, ref.metric) for ref in self.references)

    @cached_property
    def steps(self) -> frozenset[tuple[str, str, int]]:
        """(arm, metric, step) of every single step that is read."""
        return frozenset(
            (node.series.arm, node.series.metric, node.step)
            for node in walk(self.tree)
            if isinstance(node, StepValue | Contains)
        )

    @cached_property
    def max_step(self) -> int:
        """Highest training step that the check names: a single step, a window's start, the last step before
        its end.

        0 where it names none. Keys under `ray/` are seconds and do not count.
        """
        return max([0, *(step for node in walk(self.tree) for step in _named_steps(node))])

    @cached_property
    def functions(self) -> frozenset[str]:
        """Names of the functions that read series, `worst` among them."""
        return frozenset(
            node.function if isinstance(node, Call) else "worst"
            for node in walk(self.tree)
            if isinstance(node, Call | Worst)
        )

    @cached_property
    def pair(self) -> PairForm | None:
        """The check as a pair check, None where it has another form."""
        tree = self.tree
        if not isinstance(tree, Compare):
            return None
        if isinstance(tree.left, Call) and isinstance(tree.right, Constant):
            return _pair_form(tree.left, tree.op, tree.right.value)
        if isinstance(tree.right, Call) and isinstance(tree.left, Constant):
            return _pair_form(tree.right, FLIPPED[tree.op], tree.left.value)
        return None

    @cached_property
    def references(self) -> tuple[SeriesRef, ...]:
        """Every place that reads a series, in the order of the text."""
        return tuple(ref for node in walk(self.tree) for ref in _references(node))


FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, from left to right."""
    yield node
    for child in _children(node):
        yield from walk(child)


def reads_series(node: Node) -> bool:
    """Whether a value of the data takes part in the node."""
    return any(_references(below) for below in walk(node))


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Arithmetic() | Compare():
            return node.left, node.right
        case Negative() | Absolute() | Not():
            return (node.operand,)
        case Extremum() | Junction():
            return node.operands
        case Predicate():
            return (node.call,)
        case Call():
            return () if node.argument is None else (node.argument,)
        case _:
            return ()


def _references(node: Node) -> tuple[SeriesRef, ...]:
    match node:
        case StepValue() | Contains() | Worst():
            return (node.series,)
        case Call():
            return node.series
        case _:
            return ()


def _named_steps(node: Node) -> tuple[int, ...]:
    match node:
        case StepValue(step=step) | Contains(step=step):
            named: tuple[int, ...] = (step,)
        case Call(window=window) | Worst(window=window):
            named = (window.start or 0, window.end - 1)
        case _:
            return ()
    return named if any(is_keyed_by_step(ref.metric) for ref in _references(node)) else ()


def _pair_form(call: Call, op: str, limit: float) -> PairForm | None:
    if FUNCTIONS[call.function].series != 2:
        return None
    left, right = call.series
    if left.arm == right.arm:
        return None
    return PairForm(
        call.function,
        (left.arm, left.metric),
        (right.arm, right.metric),
        op,
        limit,
        call.window.start,
        call.window.end,
    )
