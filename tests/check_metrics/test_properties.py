# SPDX-License-Identifier: Apache-2.0
"""Properties over generated input: the right value, no pass on unseen data, and never a traceback."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from check_metrics import ExpressionError, Series, evaluate, parse
from check_metrics.cli import main
from check_metrics.loading import Metrics
from tests.check_metrics import reference

# Values a run can have; far from the ends of the number range, where two right formulas may differ.
VALUES = st.floats(min_value=1e-3, max_value=1e3)
# A busy machine is no failure.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
STATISTICS = ("mean", "median", "std", "slope")
PLAIN = ("min", "max", "count", "first", "last")


@st.composite
def runs(draw: st.DrawFn) -> dict[str, dict[str, dict[str, float]]]:
    """Two arms of equal, complete steps with two series each, from step 1 on or resumed."""
    first = draw(st.sampled_from([1, 1, 1, 31]))
    steps = range(first, first + draw(st.integers(3, 25)))
    return {
        arm: {name: {str(step): draw(VALUES) for step in steps} for name in ("train/loss", "timing/t")}
        for arm in ("data", "full")
    }


def windows(steps: list[int]) -> st.SearchStrategy[str]:
    """Window arguments that hold at least two steps."""
    first, last = steps[0], steps[-1]
    return st.one_of(
        st.just(""),
        st.integers(first, last - 1).map(lambda start: f", {start}"),
        st.integers(2, len(steps)).map(lambda back: f", -{back}"),
        st.integers(first, last - 2).map(lambda start: f", {start}, -1"),
        st.tuples(st.integers(first, last - 1), st.just(last + 1)).map(
            lambda ends: f", {ends[0]}, {ends[1]}"
        ),
    )


@st.composite
def numbers(draw: st.DrawFn, steps: list[int], depth: int = 2) -> str:
    """A number of the language that reads series of these steps."""
    arm = draw(st.sampled_from(["data", "full"]))
    series = f'{arm}["{draw(st.sampled_from(["train/loss", "timing/t"]))}"]'
    window = draw(windows(steps))
    leaves = [
        st.sampled_from(STATISTICS + PLAIN).map(lambda name: f"{name}({series}{window})"),
        st.sampled_from(steps).map(lambda step: f'{series}["{step}"]'),
        st.floats(0, 0.6).map(lambda share: f"mean({series}{window or ', 1'}, ignore_top_p={share!r})"),
        st.floats(0, 100).map(lambda p: f"percentile({series}, {p!r}{window})"),
        VALUES.map(lambda threshold: f"ratio_above({series}, {threshold!r}{window})"),
        st.just(f'ratio(data["timing/t"], full["timing/t"]{window})'),
        st.just(f'max_rel_diff(data["train/loss"], full["train/loss"]{window})'),
    ]
    if depth == 0:
        return draw(st.one_of(leaves))
    inner = numbers(steps, depth - 1)
    branches = [
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda part: f"({part[0]} {part[1]} {part[2]})"),
        st.tuples(inner, inner).map(lambda part: f"({part[0]} / (abs({part[1]}) + 0.5))"),
        inner.map(lambda part: f"-({part})"),
        inner.map(lambda part: f"abs({part})"),
        inner.map(lambda part: f"({part}) ** 2"),
        st.tuples(inner, inner).map(lambda part: f"max({part[0]}, {part[1]}, 0.5)"),
        st.tuples(inner, inner).map(lambda part: f"min({part[0]}, {part[1]})"),
    ]
    return draw(st.one_of(leaves + branches))


def as_series(arms: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Series]]:
    """The arms as the checker reads them."""
    return {
        arm: {
            name: Series(
                name,
                tuple(map(int, steps)),
                tuple(math.nan if value is None else float(value) for value in steps.values()),
            )
            for name, steps in metrics.items()
        }
        for arm, metrics in arms.items()
    }


@given(st.data(), runs())
@settings(CALM, max_examples=150)
def test_values_equal_an_independent_reading(data: st.DataObject, arms: dict[str, Any]) -> None:
    steps = [int(step) for step in arms["data"]["train/loss"]]
    number = data.draw(numbers(steps))
    expected = reference.answer(number, arms)
    tolerance = 1e-9 * max(1.0, reference.magnitude(number, arms))
    limit = data.draw(st.floats(-1e3, 1e3))
    result = evaluate(parse(f"{number} < {limit!r}"), as_series(arms))
    assert result.value == pytest.approx(expected, rel=1e-9, abs=tolerance), result.message
    if abs(expected - limit) > tolerance:
        assert result.status == ("PASS" if expected < limit else "FAIL")


@given(st.data(), runs())
@settings(CALM, max_examples=150)
def test_verdicts_equal_an_independent_reading(data: st.DataObject, arms: dict[str, Any]) -> None:
    """and, or, not, chains and predicates, on values that cannot fall on a limit by rounding."""
    steps = [int(step) for step in arms["data"]["train/loss"]]

    def compared(depth: int) -> str:
        step = data.draw(st.sampled_from(steps))
        one = f'{data.draw(st.sampled_from(["data", "full"]))}["train/loss"]["{step}"]'
        low, high = sorted((data.draw(VALUES), data.draw(VALUES)))
        forms = [
            f"{one} {data.draw(st.sampled_from(['<', '<=', '>', '>=', '==', '!=']))} {low!r}",
            f"{low!r} < {one} <= {high!r}",
            'all_finite(data["timing/t"])',
        ]
        if depth == 0:
            return data.draw(st.sampled_from(forms))
        left, right = compared(depth - 1), compared(depth - 1)
        forms += [f"({left} and {right})", f"({left} or {right})", f"not {left}"]
        return data.draw(st.sampled_from(forms))

    text = compared(2)
    assert (evaluate(parse(text), as_series(arms)).status == "PASS") is bool(reference.answer(text, arms))


CALLS = [
    "mean({}) < 1e9",
    "median({}) < 1e9",
    "max({}) < 1e9",
    "min({}) > -1e9",
    "ratio_above({}, -1e9) > 0",
    "percentile({}, 5) < 1e9",
    "std({}) < 1e9",
    "count({}) > 0",
    "first({}) < 1e9",
    "last({}) < 1e9",
    "slope({}) < 1e9",
    "all_finite({})",
    'ratio({}, full["train/loss"]) < 1e9',
    'max_rel_diff({}, full["train/loss"]) < 1e9',
    'worst("train/lo*") < 1e9',
    "not mean({}) > 1e9",
    "not (mean({}) > 1e9 or max({}) > 1e9)",
    'mean({}) < 1e9 or full["train/loss"]["31"] < 1e9',
]


@given(st.sampled_from(CALLS), runs(), st.data())
@settings(CALM, max_examples=150)
def test_damaged_data_never_passes(call: str, arms: dict[str, Any], data: st.DataObject) -> None:
    """A check that passes on the whole data fails once a value that it reads is gone or is no number."""
    check = parse(call.replace("{}", 'data["train/loss"]'))
    arms["full"]["train/loss"].setdefault("31", 1.0)
    arms["data"]["train/loss"].setdefault("31", 1.0)
    for arm in arms.values():
        last = max(map(int, arm["train/loss"]))
        arm["train/loss"] = {str(step): arm["train/loss"].get(str(step), 1.0) for step in range(1, last + 1)}
    assert evaluate(check, as_series(arms)).status == "PASS"

    steps = arms["data"]["train/loss"]
    inner = st.sampled_from(list(steps)[1:-1])
    kind = data.draw(st.sampled_from(["hole", "null", "nan", "inf", "empty", "gone"]))
    if kind == "hole":
        del steps[data.draw(inner)]
    elif kind == "empty":
        steps.clear()
    elif kind == "gone":
        del arms["data"]["train/loss"]
    else:
        bad = {"null": None, "nan": math.nan, "inf": math.inf}[kind]
        steps[data.draw(st.sampled_from(list(steps)))] = bad
    assert evaluate(check, as_series(arms)).status == "FAIL"


@given(runs(), st.data())
@settings(CALM, max_examples=100)
def test_a_truncated_run_never_passes_a_closed_window(arms: dict[str, Any], data: st.DataObject) -> None:
    steps = arms["data"]["train/loss"]
    end = int(list(steps)[-1]) + 1
    call = data.draw(st.sampled_from(["mean", "median", "max", "count", "last", "all_finite"]))
    comparison = "" if call == "all_finite" else " < 1e9"
    check = parse(f'{call}(data["train/loss"], {next(iter(steps))}, {end}){comparison}')
    assert evaluate(check, as_series(arms)).status == "PASS"
    for step in list(steps)[data.draw(st.integers(0, len(steps) - 1)) :]:
        del steps[step]
    assert evaluate(check, as_series(arms)).status == "FAIL"


@given(st.text(max_size=60))
@example("data[0]")
@example("\ud800")
@example("1if 2else 3")
@example("data['x']['1'] < 0x")
@example("worst('[z-a]') < 3")
@settings(CALM, max_examples=150)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        assert parse(text).metrics


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.none() | st.integers(-5, 5) | st.floats() | st.sampled_from(["nan", "1", "x"])
SERIES = st.dictionaries(st.integers(0, 6).map(str) | st.text(max_size=2), NUMBERS, max_size=5)
METRIC_NAMES = st.sampled_from(["x", "ray/a", "ray/b"]) | st.text(max_size=3)
DOCUMENTS = st.dictionaries(METRIC_NAMES, SERIES | JSON_VALUES, max_size=4)
CHECKS = st.sampled_from(
    [
        'mean(data["x"]) < 3',
        'max(data["x"], 2, -1) > 0 or all_finite(data["x"])',
        'not (data["x"]["1"] < 3)',
        'worst("*") < 3',
        'worst("ray/*", 1) > 0',
        'ratio(data["x"], data["ray/a"]) < 3',
        'max_rel_diff(data["ray/a"], data["ray/b"]) >= 0',
        'slope(data["x"]) / std(data["x"]) < 1',
        '1 / data["x"]["1"] ** 64 < 3',
    ]
)


def status_of(folder: Path, content: bytes, checks: list[str], options: list[str]) -> int:
    """Exit status on a file with this content; a traceback fails the test."""
    path = folder / "metrics.json"
    path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main([str(path), *options, "--", *checks])
    assert isinstance(left.value.code, int)
    assert (out.getvalue() == "") is (left.value.code == 2)
    return left.value.code


OPTIONS = st.sampled_from(
    [[], ["--json"], ["--github"], ["--warmup", "2"], ["--segments", "1,3"], ["--allow-nonfinite", "*"]]
)


@given(DOCUMENTS | JSON_VALUES, st.lists(CHECKS | st.text(max_size=8), min_size=1, max_size=3), OPTIONS)
@settings(CALM, max_examples=150)
def test_any_document_gives_a_verdict_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, document: Any, checks: list[str], options: list[str]
) -> None:
    content = json.dumps(document).encode()
    assert status_of(tmp_path_factory.getbasetemp(), content, checks, options) in (0, 1, 2)


@given(st.binary(max_size=80), st.lists(CHECKS, min_size=1, max_size=2))
@settings(CALM, max_examples=100)
def test_any_bytes_give_a_verdict_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, checks: list[str]
) -> None:
    # no random bytes hold the series that these checks read
    assert status_of(tmp_path_factory.getbasetemp(), content, checks, []) in (1, 2)


@given(DOCUMENTS, CHECKS)
@settings(CALM, max_examples=150)
def test_a_pass_has_seen_finite_numbers(document: dict[str, Any], check: str) -> None:
    """What passes shows finite sides of its comparisons, and every series it names is there."""
    series = Metrics("document", dict(document))
    result = evaluate(parse(check), {"data": series})
    if result.status == "PASS":
        assert all(math.isfinite(each.left) and math.isfinite(each.right) for each in result.comparisons)
        for _, metric in parse(check).metrics:
            assert "*" in metric or series[metric].steps
