# SPDX-License-Identifier: Apache-2.0
"""Reads the text of a check into the allow-listed tree of `check_metrics.syntax`.

Python's own parser does the grammar; each of its nodes is then either translated or refused by name. Nothing
of the text is ever compiled or executed.
"""

import ast
import math
import warnings
from itertools import pairwise

from check_metrics.direction import NoDirectionError, orient
from check_metrics.errors import DataError, ExpressionError
from check_metrics.functions import FUNCTIONS, RANGE_END, RANGE_START, Function, arithmetic
from check_metrics.syntax import (
    Absolute,
    Arithmetic,
    Call,
    Compare,
    Constant,
    Contains,
    Expression,
    Extremum,
    Junction,
    Negative,
    Not,
    Number,
    Predicate,
    SeriesRef,
    StepValue,
    Truth,
    Window,
    Worst,
    reads_series,
)
from check_metrics.text import shortened

MAX_LENGTH = 4096
MAX_NODES = 400
MAX_DEPTH = 40
MAX_EXPONENT = 64.0
MAX_STEP = 10**12

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
CALLABLE = frozenset({*FUNCTIONS, "worst", "abs"})


def parse(text: str) -> Expression:
    """The check as an Expression; ExpressionError names the token that is not part of the language."""
    reader = _Reader(text)
    try:
        return Expression(text, orient(reader.truth(reader.root)))
    except NoDirectionError as error:
        ref = error.node.series
        reason = "worst() must stand on one side of < or >, where it is clear whether high or low is bad"
        raise ExpressionError(text, reason, f"worst({ref})", ref.column) from None


class _Reader:
    """Translates one text; its methods mirror the kinds of value: truth, number, series."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.source = self._flattened(text)
        self._indent = len(self.source) - len(self.source.lstrip())
        self.root = self._grammar()

    def _flattened(self, text: str) -> str:
        if len(text) > MAX_LENGTH:
            raise ExpressionError(shortened(text), f"longer than {MAX_LENGTH} characters")
        if not text.strip():
            raise ExpressionError(text, "empty; write a comparison")
        broken = any(character in text.strip() for character in "\r\n")
        if broken and "#" in text:
            raise ExpressionError(text, "a comment would hide the lines after it; put the check on one line")
        flat = text.translate(dict.fromkeys(map(ord, "\t\r\n"), " "))
        for index, character in enumerate(flat):
            if not character.isprintable():
                raise ExpressionError(text, "unprintable character", ascii(character)[1:-1], index + 1)
        return flat

    def _grammar(self) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                root = ast.parse(self.source[self._indent :], mode="eval").body
        except SyntaxError as error:
            column = self._indent + max(error.offset or 1, 1)
            token = self.source[column - 1 :].split(" ")[0] or "end of text"
            raise ExpressionError(self.text, error.msg, shortened(token), column) from None
        except (ValueError, MemoryError, RecursionError):
            raise ExpressionError(self.text, "nested too deeply or not a text of this language") from None
        self._bounded(root)
        return root

    def _bounded(self, root: ast.expr) -> None:
        level: list[ast.AST] = [root]
        count = depth = 0
        while level:
            count += len(level)
            depth += 1
            if count > MAX_NODES or depth > MAX_DEPTH:
                raise ExpressionError(
                    self.text,
                    f"too large: at most {MAX_NODES} parts, {MAX_DEPTH} levels; split it into checks",
                )
            level = [child for node in level for child in ast.iter_child_nodes(node)]

    def column(self, node: ast.expr | ast.keyword) -> int:
        """1-based column of the node's first character."""
        before = self.source[self._indent :].encode()[: node.col_offset]
        return self._indent + len(before.decode()) + 1

    def token(self, node: ast.expr | ast.keyword) -> str:
        """The node's text."""
        encoded = self.source[self._indent :].encode()
        return shortened(encoded[node.col_offset : node.end_col_offset].decode())

    def refusal(self, node: ast.expr | ast.keyword, reason: str) -> ExpressionError:
        """The ExpressionError that names the node."""
        return ExpressionError(self.text, reason, self.token(node), self.column(node))

    def truth(self, node: ast.expr) -> Truth:
        """A part that holds or does not."""
        match node:
            case ast.Compare(left=step, ops=[ast.In() | ast.NotIn() as op], comparators=[series]):
                contains = Contains(self.series(series), self._step(step))
                return Not(contains) if isinstance(op, ast.NotIn) else contains
            case ast.Compare():
                return self._comparison(node)
            case ast.BoolOp(op=op, values=values):
                return Junction(isinstance(op, ast.And), tuple(map(self.truth, values)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Not(self.truth(operand))
            case ast.Call(func=ast.Name(id="all_finite")):
                return Predicate(self._function(node, "all_finite"))
            case _:
                self.number(node)
                raise self.refusal(node, "not a comparison; write one such as `mean(…) < 3`")

    def number(self, node: ast.expr) -> Number:
        """A part that has a number as its value."""
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._constant(node, value)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.number(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self.number(operand)
                return Constant(-number.value) if isinstance(number, Constant) else Negative(number)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Call(func=ast.Name(id=name)):
                return self._called(node, name)
            case ast.Subscript(value=ast.Subscript() as series, slice=key):
                return StepValue(self.series(series), self._step(key))
            case ast.Subscript():
                ref = shortened(str(self.series(node)))
                raise self.refusal(node, f'a series is no number; write {ref}["1"] or mean({ref})')
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                raise self.refusal(node, "holds or does not; a number is needed here")
            case ast.Name(id=name) if name not in CALLABLE:
                raise self.refusal(
                    node,
                    f'a name alone is no number; read a series with {shortened(name)}["METRIC"]',
                )
            case _:
                raise self.refusal(node, "not part of the language")

    def series(self, node: ast.expr) -> SeriesRef:
        """`arm["metric"]`."""
        match node:
            case ast.Subscript(value=ast.Name(id=arm), slice=ast.Constant(value=str() as metric)):
                if arm in CALLABLE:
                    raise self.refusal(node, f"{arm} is a function, not an arm; call it as {arm}(…)")
                return SeriesRef(arm, metric, self.column(node))
            case ast.Subscript(value=ast.Name(), slice=key):
                raise self.refusal(key, 'a metric is named by a string, data["train/loss"]')
            case _:
                raise self.refusal(node, 'a series is needed here, data["train/loss"]')

    def _comparison(self, node: ast.Compare) -> Truth:
        operands = [self.number(operand) for operand in (node.left, *node.comparators)]
        pairs: list[Truth] = []
        for symbol, (left, right) in zip(node.ops, pairwise(operands), strict=True):
            op = _COMPARISONS.get(type(symbol))
            if op is None:
                raise self.refusal(node, "only < <= > >= == != compare")
            pairs.append(Compare(op, left, right))
        if not any(map(reads_series, operands)):
            raise self.refusal(node, "compares constants and reads no series, so it says nothing of the run")
        return pairs[0] if len(pairs) == 1 else Junction(True, tuple(pairs))

    def _constant(self, node: ast.expr, value: float) -> Constant:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            raise self.refusal(node, "number too large")
        return Constant(number)

    def _arithmetic(self, node: ast.BinOp) -> Number:
        op = _OPERATORS.get(type(node.op))
        if op is None:
            raise self.refusal(node, "only + - * / // % ** compute")
        left, right = self.number(node.left), self.number(node.right)
        if op == "**" and not (isinstance(right, Constant) and abs(right.value) <= MAX_EXPONENT):
            raise self.refusal(node.right, f"an exponent must be a constant of at most {MAX_EXPONENT:g}")
        if isinstance(left, Constant) and isinstance(right, Constant):
            try:
                return Constant(arithmetic(op, left.value, right.value))
            except DataError as error:
                raise self.refusal(node, str(error)) from None
        return Arithmetic(op, left, right)

    def _called(self, node: ast.Call, name: str) -> Number:
        if name == "worst":
            return self._worst(node)
        if name == "abs":
            return self._absolute(node)
        if name in ("min", "max") and not self._opens_with_series(node):
            return self._extremum(node, name)
        if name == "all_finite":
            raise self.refusal(node, "holds or does not; it stands alone or under and, or, not")
        return self._function(node, name)

    def _opens_with_series(self, node: ast.Call) -> bool:
        match node.args:
            case [ast.Subscript(value=ast.Name()), *_]:
                return True
            case _:
                return False

    def _absolute(self, node: ast.Call) -> Number:
        if len(node.args) != 1 or node.keywords:
            raise self.refusal(node, "abs takes one number")
        number = self.number(node.args[0])
        return Constant(abs(number.value)) if isinstance(number, Constant) else Absolute(number)

    def _extremum(self, node: ast.Call, name: str) -> Number:
        if len(node.args) < 2 or node.keywords:
            raise self.refusal(node, f"{name} takes one series and its window, or two and more numbers")
        return Extremum(name == "max", tuple(map(self.number, node.args)))

    def _function(self, node: ast.Call, name: str) -> Call:
        function = FUNCTIONS.get(name)
        if function is None:
            raise self.refusal(node, f"no such function; there are {', '.join(sorted(CALLABLE))}")
        if len(node.args) < function.series:
            raise self.refusal(node, f'{name} reads {function.series} series first, data["train/loss"]')
        series = tuple(map(self.series, node.args[: function.series]))
        given = self._parameters(node, name, function.parameters, node.args[function.series :])
        argument = self._argument(node, name, function, given)
        return Call(name, series, self._window(given, function.first_step), argument)

    def _worst(self, node: ast.Call) -> Worst:
        match node.args:
            case [ast.Constant(value=str() as pattern), *rest]:
                ref = SeriesRef("data", pattern, self.column(node.args[0]))
            case [ast.expr() as series, *rest]:
                ref = self.series(series)
            case _:
                raise self.refusal(node, 'worst takes a glob of metrics first, "ray/node.*.gpu.*.mem_gb"')
        given = self._parameters(node, "worst", (RANGE_START, RANGE_END), rest)
        return Worst(ref, self._window(given, None), highest=True)

    def _parameters(
        self, node: ast.Call, name: str, parameters: tuple[str, ...], positional: list[ast.expr]
    ) -> dict[str, ast.expr]:
        if len(positional) > len(parameters):
            raise self.refusal(
                positional[len(parameters)], f"{name} takes {', '.join(parameters)} after its series"
            )
        given = dict(zip(parameters, positional, strict=False))
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg not in parameters:
                raise self.refusal(keyword, f"{name} has the keywords {', '.join(parameters)}")
            if keyword.arg in given:
                raise self.refusal(keyword, f"{name} got {keyword.arg} twice")
            given[keyword.arg] = keyword.value
        return given

    def _argument(
        self, node: ast.Call, name: str, function: Function, given: dict[str, ast.expr]
    ) -> Number | None:
        if function.argument is None:
            return None
        part = given.get(function.argument)
        if part is None:
            if function.default is None:
                raise self.refusal(node, f"{name} needs {function.argument}")
            return Constant(function.default)
        number = self.number(part)
        if function.bounds is None:
            return number
        low, high = function.bounds
        if not (isinstance(number, Constant) and low <= number.value <= high):
            raise self.refusal(part, f"{function.argument} must be a constant from {low:g} to {high:g}")
        return number

    def _window(self, given: dict[str, ast.expr], first_step: int | None) -> Window:
        start = self._window_end(given[RANGE_START]) if RANGE_START in given else first_step
        end = self._window_end(given[RANGE_END]) if RANGE_END in given else 0
        return Window(start, end, names_start=RANGE_START in given)

    def _window_end(self, part: ast.expr) -> int:
        number = self.number(part)
        if not (isinstance(number, Constant) and number.value.is_integer() and abs(number.value) <= MAX_STEP):
            raise self.refusal(part, "an end of a window must be a whole constant number, a step")
        return int(number.value)

    def _step(self, key: ast.expr) -> int:
        match key:
            case ast.Constant(value=str() as text) if (
                text.isascii() and text.isdigit() and str(int(text)) == text
            ):
                if int(text) > MAX_STEP:
                    raise self.refusal(key, "step too large")
                return int(text)
            case _:
                raise self.refusal(key, 'a step is named by a string of digits, data["train/loss"]["1"]')
