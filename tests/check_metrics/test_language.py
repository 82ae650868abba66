# SPDX-License-Identifier: Apache-2.0
"""What the language takes, what it refuses with which token, and what can be read off an expression."""

import pytest

from check_metrics import ExpressionError, PairForm, parse
from check_metrics.language import MAX_DEPTH, MAX_LENGTH, MAX_NODES

LOSS = 'data["train/loss"]'
TIME = 'data["timing/train/total_step_time"]'


@pytest.mark.parametrize(
    "text",
    [
        f'{LOSS}["1"] < 1.0',
        f'{LOSS}["50"] < 0.8',
        f'{LOSS}["1"] == 16',
        f"mean({TIME}, 2) < 30",
        f"mean({TIME},-6,-1) < 0.6",
        f"mean({LOSS}, range_start=-6, range_end=-1) < 0.07",
        f"mean({LOSS}, ignore_top_p=0.05) < 1.5",
        f"median({LOSS}) < 1.1",
        f"ratio_above({LOSS}, 1.05) < 0.02",
        'max(data["ray/node.0.gpu.0.mem_gb"]) < 60',
        f"min({LOSS}) > 0",
        f"all_finite({LOSS})",
        f"len({LOSS}) == 30",
        f"'50' in {LOSS}",
        f"'50' not in {LOSS} or {LOSS}['50'] < 3",
        f"abs({LOSS}['1'] - 0.6931) < 0.0005",
        f'({LOSS}["1"] - mean({LOSS}, -6, -1)) / {LOSS}["1"] > 0.20',
        f'mean({LOSS}, -5, -1) < 0.6 * {LOSS}["1"]',
        'data["validation/kl_loss"]["100"] < 0.72 * data["validation/kl_loss"]["0"]',
        f"0 < mean({LOSS}) < 3",
        f"3 > mean({LOSS})",
        f"mean({LOSS}) != 3",
        f"(mean({LOSS}) < 3)",
        f"not (mean({LOSS}) > 3)",
        f"mean({LOSS}) < 3 and max({LOSS}) < 5 or min({LOSS}) >= 0",
        'max(data["a < b"]) < 3',
        'max(data["x > y == z"]) <= 3',
        f"min(1, 2, {LOSS}['1']) <= +1",
        f"max(mean({LOSS}), median({LOSS})) < 3",
        f"mean({LOSS}, 50 - 5, 50 + 1) < 3",
        f"mean({LOSS}, 2.0) < 3",
        f"  mean({LOSS}) < 3  # a comment",
        f"mean(\n  {LOSS},\n  2,\n) < 3\n",
        f"ratio_above({LOSS}, 1.5 * median({LOSS}), 2) < 0.1",
        'worst("ray/node.*.gpu.*.mem_gb", 60) * 2 / 3 < 60',
        '1 - worst(lora["a*"]) > 0.5 * -worst("b*")',
        f"max(worst('a*'), {LOSS}['1']) < 3",
        f"2 ** 3 * {LOSS}['1'] ** 2 // 1 % 7 < 100",
    ],
)
def test_accepted(text: str) -> None:
    assert parse(text).text == text


REFUSED = [
    ("", None, "empty"),
    (" \t\n", None, "empty"),
    ("True", "True", "not part of the language"),
    ("1", "1", "not a comparison"),
    ("1 < 2", "1 < 2", "reads no series"),
    (f"mean({LOSS}) < 3 or 1 < 2", "1 < 2", "reads no series"),
    (LOSS, LOSS, "a series is no number"),
    (f'{LOSS}["1"]', f'{LOSS}["1"]', "not a comparison"),
    (f"mean({LOSS})", f"mean({LOSS})", "not a comparison"),
    (f"mean({LOSS}) and max({LOSS}) < 3", f"mean({LOSS})", "not a comparison"),
    ('__import__("os").getcwd() == "/some/dir"', '__import__("os").getcwd()', "not part of the language"),
    ('open("/etc/passwd") < 3', 'open("/etc/passwd")', "no such function"),
    (f"{LOSS}.values() < 3", f"{LOSS}.values()", "not part of the language"),
    (f"sum({LOSS}) < 3", f"sum({LOSS})", "no such function; there are abs, all_finite"),
    (f"max([1, {LOSS}['1']]) < 3", f"max([1, {LOSS}['1']])", "two and more numbers"),
    (f"any(x > 3 for x in {LOSS})", f"any(x > 3 for x in {LOSS})", "no such function"),
    (f"(lambda: 1) < {LOSS}['1']", "lambda: 1", "not part of the language"),
    (f"{LOSS}['1'] is 3", f"{LOSS}['1'] is 3", "only < <= > >= == != compare"),
    (f"{LOSS}['1'] in {LOSS}", f"{LOSS}['1']", "string of digits"),
    ("'1' in 3", "3", "a series is needed here"),
    (f"'one' in {LOSS}", "'one'", "string of digits"),
    ("'x' in data", "data", "a series is needed here"),
    (f"'1' in {LOSS} < 3", "'1'", "not part of the language"),
    ("max({**data.get('a', {}), **data.get('b', {})}) == 0", None, None),
    (f"{LOSS}['1'] & 3 < 4", f"{LOSS}['1'] & 3", "only + - * / // % ** compute"),
    (f"~{LOSS}['1'] < 4", f"~{LOSS}['1']", "not part of the language"),
    (f"{LOSS}['1'] < '3'", "'3'", "not part of the language"),
    (f"{LOSS}['1'] < 3j", "3j", "not part of the language"),
    (f"{LOSS}['1'] < None", "None", "not part of the language"),
    (f"{LOSS}['1'] < f'{{1}}'", "f'{1}'", "not part of the language"),
    (f"(mean({LOSS}) < 3) == True", f"mean({LOSS}) < 3", "a number is needed here"),
    (f"mean({LOSS}) < (not 3)", "not 3", "a number is needed here"),
    (f"mean({LOSS}) < all_finite({LOSS})", f"all_finite({LOSS})", "it stands alone"),
    (f"mean({LOSS}) < 3 if 1 else 2", f"mean({LOSS}) < 3 if 1 else 2", "not part of the language"),
    ("data < 3", "data", 'data["METRIC"]'),
    ("mean < 3", "mean", "not part of the language"),
    ("mean(data) < 3", "data", "a series is needed here"),
    ("mean() < 3", "mean()", "reads 1 series first"),
    (f"ratio({LOSS}) < 3", f"ratio({LOSS})", "reads 2 series first"),
    ('mean["x"]["1"] < 3', 'mean["x"]', "is a function, not an arm"),
    ('data[1]["1"] < 3', "1", "named by a string"),
    ('data["x"][1] < 3', "1", "string of digits"),
    ('data["x"]["-1"] < 3', '"-1"', "string of digits"),
    ('data["x"]["01"] < 3', '"01"', "string of digits"),
    ('data["x"]["last"] < 3', '"last"', "string of digits"),
    ('data["x"]["٣"] < 3', '"٣"', "string of digits"),
    (f'data["x"]["{10**13}"] < 3', f'"{10**13}"', "step too large"),
    ('data["x"]["1"]["2"] < 3', 'data["x"]["1"]', "a series is needed here"),
    ('data["x"][1:2] < 3', "1:2", "string of digits"),
    (f"mean({LOSS}, 1.5) < 3", "1.5", "whole constant number"),
    (f"mean({LOSS}, {LOSS}['1']) < 3", f"{LOSS}['1']", "whole constant number"),
    (f"mean({LOSS}, 10 ** 40) < 3", "10 ** 40", "whole constant number"),
    (f"mean({LOSS}, 1, 2, 0.1, 5) < 3", "5", "mean takes range_start, range_end, ignore_top_p"),
    (f"mean({LOSS}, start=2) < 3", "start=2", "mean has the keywords"),
    (f"mean({LOSS}, **{LOSS}) < 3", f"**{LOSS}", "mean has the keywords"),
    (f"mean(*{LOSS}) < 3", f"*{LOSS}", "a series is needed here"),
    (f"mean({LOSS}, 2, range_start=3) < 3", "range_start=3", "got range_start twice"),
    (f"mean({LOSS}, ignore_top_p=1.5) < 3", "1.5", "from 0 to 1"),
    (f"mean({LOSS}, ignore_top_p={LOSS}['1']) < 3", f"{LOSS}['1']", "from 0 to 1"),
    (f"percentile({LOSS}, 101) < 3", "101", "from 0 to 100"),
    (f"percentile({LOSS}) < 3", f"percentile({LOSS})", "needs p"),
    (f"ratio_above({LOSS}) < 3", f"ratio_above({LOSS})", "needs threshold"),
    (f"abs({LOSS}) < 3", LOSS, "a series is no number"),
    (f"abs({LOSS}['1'], 2) < 3", f"abs({LOSS}['1'], 2)", "abs takes one number"),
    (f"min({LOSS}['1']) < 3", f"min({LOSS}['1'])", "two and more numbers"),
    ("worst() < 3", "worst()", "takes a glob"),
    ("worst(3) < 3", "3", "a series is needed here"),
    ('worst("a*", x=1) < 3', "x=1", "worst has the keywords"),
    (f"{LOSS}['1'] < 1e999", "1e999", "number too large"),
    (f"{LOSS}['1'] < 1{'0' * 400}", "1" + "0" * 39 + "…", "number too large"),
    (f"{LOSS}['1'] < 1 / 0", "1 / 0", "divides by zero"),
    (f"{LOSS}['1'] < 2.0 ** 64 ** 2", "64 ** 2", "exponent"),
    (f"{LOSS}['1'] < 2 ** {LOSS}['1']", f"{LOSS}['1']", "exponent"),
    (f"{LOSS}['1'] < 9e9 ** 64", "9e9 ** 64", "too large"),
    (f"{LOSS}['1'] < (-8) ** 0.5", "(-8) ** 0.5", "not a finite real number"),
    (f"mean({LOSS}) < 3; 1", ";", None),
    (f"mean({LOSS}) <", None, None),
    (f"mean({LOSS} < 3", None, None),
    (f"mean({LOSS}) < 3\x00", "\\x00", "unprintable"),
    (f"mean({LOSS})\x0c < 3", "\\x0c", "unprintable"),
    (f"{LOSS}['1'] < \ud800", "\\ud800", "unprintable"),
    (f"mean({LOSS}) < 3 # one\nand max({LOSS}) < 1", None, "a comment would hide"),
    (f"mean({LOSS}) < 3\nmax({LOSS}) < 1", None, None),
    ("(" * 300 + "1" + ")" * 300 + f"< {LOSS}['1']", None, None),
    ("-" * 3000 + f"{LOSS}['1'] < 3", None, None),
    ("x" * (MAX_LENGTH + 1), None, "longer than"),
    (" and ".join([f"{LOSS}['1'] < 3"] * MAX_NODES)[:MAX_LENGTH], None, None),
    ("-" * MAX_DEPTH + f"{LOSS}['1'] < 3", None, "too large: at most"),
    ("+".join(["1"] * MAX_NODES) + f" < {LOSS}['1']", None, "too large: at most"),
    ('worst("a*") == 3', 'worst(data["a*"])', "must stand on one side"),
    ('abs(worst("a*")) < 3', 'worst(data["a*"])', "must stand on one side"),
    ('worst("a*") * -1 < 3', 'worst(data["a*"])', "must stand on one side"),
    (f'worst("a*") * {LOSS}["1"] < 3', 'worst(data["a*"])', "must stand on one side"),
    (f'ratio_above({LOSS}, worst("a*")) < 3', 'worst(data["a*"])', "must stand on one side"),
]


@pytest.mark.parametrize(("text", "token", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_refused(text: str, token: str | None, reason: str | None) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    if token is not None:
        assert caught.value.token == token
        assert caught.value.column is not None
    if reason is not None:
        assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("True", 1),
        ("  foo(1) < 2", 3),
        ('data["é"]["1"] < foo(2)', 18),
        (f"mean({LOSS}) < 3 or\n 1 < 2", 34),
    ],
)
def test_column_of_the_token(text: str, column: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert caught.value.column == column
    assert f"column {column}" in str(caught.value)


def test_facts_of_an_expression() -> None:
    expression = parse(
        'lora["train/loss"]["50"] < 1.1 * full["train/loss"]["50"] and worst(lora["ray/*"], 600, 900) < 60'
        ' and mean(data["validation/loss"], 10, 41) < 3 and all_finite(lora["train/grad_norm"])'
    )
    assert expression.arms == {"lora", "full", "data"}
    assert expression.metrics == {
        ("lora", "train/loss"),
        ("full", "train/loss"),
        ("lora", "ray/*"),
        ("data", "validation/loss"),
        ("lora", "train/grad_norm"),
    }
    assert expression.steps == {("lora", "train/loss", 50), ("full", "train/loss", 50)}
    assert expression.functions == {"worst", "mean", "all_finite"}
    assert expression.pair is None


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (f"mean({LOSS}) < 3", 1),
        (f"max({LOSS}) < 3", 0),
        (f"mean({LOSS}, 2) < 3", 2),
        (f"mean({LOSS}, -6, -1) < 3", 0),
        (f"mean({LOSS}, 2, 51) < 3", 50),
        (f"mean({LOSS}, 2, 51) < {LOSS}['60']", 60),
        (f"ratio_above({LOSS}, {LOSS}['7']) < 3", 7),
        ('max(data["ray/node.0.gpu.0.mem_gb"], 600) < 3', 0),
        ('worst("train/*", 5) < 3', 5),
    ],
)
def test_highest_named_step(text: str, step: int) -> None:
    assert parse(text).max_step == step


def test_a_step_in_a_series_is_a_named_step() -> None:
    expression = parse('"60" in data["validation/loss"]')
    assert expression.steps == {("data", "validation/loss", 60)}
    assert expression.max_step == 60


def test_pair_form() -> None:
    expected = PairForm("ratio", ("lora", "t"), ("full", "u"), "<", 0.8)
    assert parse('ratio(lora["t"], full["u"]) < 0.80').pair == expected
    assert parse('0.8 > ratio(lora["t"], full["u"])').pair == expected
    assert parse('not ratio(lora["t"], full["u"]) >= 0.4 * 2').pair == expected
    windowed = parse('max_rel_diff(a["t"], b["t"], 2, -1) <= 1e-4').pair
    assert windowed == PairForm("max_rel_diff", ("a", "t"), ("b", "t"), "<=", 1e-4, 2, -1)


@pytest.mark.parametrize(
    "text",
    [
        'ratio(a["t"], a["u"]) < 1',
        'ratio(a["t"], b["u"]) < a["t"]["1"]',
        'ratio(a["t"], b["u"]) * 2 < 1',
        '0 < ratio(a["t"], b["u"]) < 1',
        'mean(a["t"]) < 1',
        '1 > mean(a["t"])',
        'mean(a["t"]) < mean(b["t"])',
        'all_finite(a["t"])',
    ],
)
def test_no_pair_form(text: str) -> None:
    assert parse(text).pair is None


def test_long_text_is_shortened_in_the_message() -> None:
    with pytest.raises(ExpressionError) as caught:
        parse("x" * 3000)
    assert len(str(caught.value)) < 400
