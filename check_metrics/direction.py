# SPDX-License-Identifier: Apache-2.0
"""Decides for each `worst` of a check whether its highest or its lowest value is the worst one.

The rule is that the comparison must hold for every matching series: under `worst(p) < limit` the highest
value decides, under `worst(p) > limit` the lowest, and a `not` around the comparison turns it.
"""

from dataclasses import replace

from check_metrics.syntax import (
    Absolute,
    Arithmetic,
    Call,
    Compare,
    Constant,
    Contains,
    Extremum,
    Junction,
    Negative,
    Not,
    Number,
    Predicate,
    Truth,
    Worst,
)

_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}

# True: the part is held below a limit, so its highest value decides. False: above one. None: neither.
Side = bool | None


class NoDirectionError(Exception):
    """A `worst` stands where neither its highest nor its lowest value is clearly the worst."""

    def __init__(self, node: Worst) -> None:
        self.node = node
        super().__init__(str(node.series))


def orient(node: Truth, *, negated: bool = False) -> Truth:
    """The tree with every `not` carried down to what it negates and every `worst` decided.

    Finite numbers are ordered, so `not a < b` is `a >= b`. NoDirectionError where a `worst` has no direction.
    """
    match node:
        case Not(operand=operand):
            return orient(operand, negated=not negated)
        case Junction(conjunction=conjunction, operands=operands):
            carried = tuple(orient(each, negated=negated) for each in operands)
            return Junction(conjunction != negated, carried)
        case Compare(op=op, left=left, right=right):
            op = _NEGATED[op] if negated else op
            below: Side = {"<": True, ">": False}.get(op[0])
            return Compare(op, _oriented(left, below), _oriented(right, _flipped(below)))
        case Predicate() | Contains():
            return Not(node) if negated else node


def _oriented(node: Number, below: Side) -> Number:
    match node:
        case Worst():
            if below is None:
                raise NoDirectionError(node)
            return replace(node, highest=below)
        case Negative(operand=operand):
            return Negative(_oriented(operand, _flipped(below)))
        case Arithmetic(op=op, left=left, right=right):
            left_side, right_side = _sides(node, below)
            return Arithmetic(op, _oriented(left, left_side), _oriented(right, right_side))
        case Extremum(operands=operands):
            return replace(node, operands=tuple(_oriented(each, below) for each in operands))
        case Absolute(operand=operand):
            return Absolute(_oriented(operand, None))
        case Call(argument=argument) if argument is not None:
            return replace(node, argument=_oriented(argument, None))
        case _:
            return node


def _sides(node: Arithmetic, below: Side) -> tuple[Side, Side]:
    """Sides of the operands: sums keep the direction, products with a positive constant do, nothing else."""
    match node:
        case Arithmetic(op="+"):
            return below, below
        case Arithmetic(op="-"):
            return below, _flipped(below)
        case Arithmetic(op="*" | "/", right=Constant(value=value)) if value > 0:
            return below, None
        case Arithmetic(op="*", left=Constant(value=value)) if value > 0:
            return None, below
        case _:
            return None, None


def _flipped(below: Side) -> Side:
    return None if below is None else not below
