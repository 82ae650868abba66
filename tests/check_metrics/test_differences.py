# SPDX-License-Identifier: Apache-2.0
"""Where our verdict differs from the field's checker, row by row, and that it is the same everywhere else."""

import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from check_metrics import ExpressionError, parse
from tests.check_metrics import reference
from tests.check_metrics.helpers import Steps, judge

NAN = float("nan")
LOSS: dict[int, float | None] = {step: 2.0 / step for step in range(1, 43)}


def share(steps: Mapping[str, float], threshold: float) -> float:
    """The field's ratio_above."""
    values = [float(value) for value in steps.values()]
    return sum(value >= threshold for value in values) / len(values) if values else 0.0


FIELD: dict[str, Any] = {
    "min": lambda steps: min(float(value) for value in steps.values()),
    "max": lambda steps: max(float(value) for value in steps.values()),
    "mean": reference.mean,
    "median": lambda steps, start=1, end=0: statistics.median(reference.cut(steps, start, end).values()),
    "ratio_above": share,
}


def field_verdict(check: str, data: Mapping[str, Mapping[int, float | None]]) -> str:
    """The field's rule: any Python, PASS where its value is true, FAIL where it raises."""
    series = {name: {str(step): value for step, value in steps.items()} for name, steps in data.items()}
    try:
        return "PASS" if eval(check, {}, {**FIELD, "data": series}) else "FAIL"
    except Exception:
        return "FAIL"


def our_verdict(check: str, data: Mapping[str, Steps]) -> str:
    """PASS, FAIL, or the exit status 2 of a refused check."""
    try:
        parse(check)
    except ExpressionError:
        return "2"
    return judge(check, data).status


DIFFERENCES = [
    ('max(data["x"]) < 2', {"x": {1: 1.0, 2: NAN, 3: 0.5}}, "PASS", "FAIL"),
    ('min(data["x"]) > 0', {"x": {1: 1.0, 2: NAN, 3: 0.5}}, "PASS", "FAIL"),
    ('ratio_above(data["x"], 1.05) < 0.02', {"x": {1: NAN, 2: NAN}}, "PASS", "FAIL"),
    ('ratio_above(data["x"], 1.05) < 0.02', {"x": {}}, "PASS", "FAIL"),
    ('max(data["x"]) > 2', {"x": {1: 1.0, 2: float("inf")}}, "PASS", "FAIL"),
    ('mean(data["x"]) < 2', {"x": {1: 1.0, 2: 1.0, 4: 1.0}}, "PASS", "FAIL"),
    ('mean(data["x"], 40, 51) < 2', {"x": LOSS}, "PASS", "FAIL"),
    ("True", {"x": LOSS}, "PASS", "2"),
    ('data["x"]["1"]', {"x": {1: NAN}}, "PASS", "2"),
    ('mean(data["x"])', {"x": LOSS}, "PASS", "2"),
    ('mean(data["x"]) < 3 or 1 < 2', {"x": LOSS}, "PASS", "2"),
    ('mean(data["x"]) < 3 or data["gone"]["1"] < 2', {"x": LOSS}, "PASS", "FAIL"),
    ('max(1, data["x"]["1"]) < 3', {"x": LOSS}, "FAIL", "PASS"),
    ('percentile(data["x"], 95) < 3', {"x": LOSS}, "FAIL", "PASS"),
    ('mean(data["x"], len(data["x"]) - 5) < 3', {"x": LOSS}, "PASS", "2"),
    ('mean(data["x"], 1.5) < 3', {"x": LOSS}, "PASS", "2"),
    ('max({**data["x"], **data["y"]}) < 3', {"x": LOSS, "y": LOSS}, "PASS", "2"),
    ('data["x"]["01"] < 3', {"x": LOSS}, "FAIL", "2"),
]


@pytest.mark.parametrize(("check", "data", "field", "ours"), DIFFERENCES, ids=range(len(DIFFERENCES)))
def test_difference(check: str, data: dict[str, Any], field: str, ours: str) -> None:
    assert field_verdict(check, data) == field
    assert our_verdict(check, data) == ours


SAME = [
    'data["x"]["1"] < 2.5',
    'data["x"]["1"] < 2',
    'data["x"]["50"] < 0.8',
    'data["gone"]["1"] < 0.8',
    'mean(data["gone"]) < 0.8',
    'data["x"]["1"] == 2',
    'data["x"]["1"] != 2',
    'mean(data["x"], 2) < 0.2',
    'mean(data["x"], -6, -1) < 0.06',
    'mean(data["x"],-10,-1) < 0.05',
    'mean(data["x"], range_start=-6, range_end=-1) < 0.06',
    'mean(data["x"], ignore_top_p=0.05) < 0.15',
    'mean(data["x"], 2, 43) < 0.2',
    'mean(data["x"], -60) < 0.3',
    'mean(data["x"], 50) < 3',
    'median(data["x"]) < 0.1',
    'median(data["x"], -20, 0) < 0.1',
    'ratio_above(data["x"], 1) < 0.05',
    'ratio_above(data["x"], 1) < 0.04',
    'min(data["x"]) > 0',
    'max(data["ray/g"]) < 60',
    'mean(data["ray/g"], 5, 90) < 60',
    'mean(data["validation/loss"], -2) < 1.5',
    'mean(data["validation/loss"]) < 2.1',
    '0 < mean(data["x"]) < 3',
    '3 > mean(data["x"])',
    'mean(data["x"]) < 3 and max(data["x"]) < 5 and not min(data["x"]) < 0',
    'mean(data["x"]) < 0.01 or max(data["x"]) < 5',
    'abs(data["x"]["1"] - 2.0001) < 0.0005',
    '(data["x"]["1"] - mean(data["x"], -6, -1)) / data["x"]["1"] > 0.20',
    'mean(data["x"], -5, -1) < 0.6 * data["x"]["1"]',
    'data["validation/loss"]["30"] < 0.72 * data["validation/loss"]["0"]',
    '"30" in data["validation/loss"]',
    '"31" in data["validation/loss"]',
    '"31" not in data["validation/loss"]',
    'len(data["x"]) == 42',
]


@pytest.mark.parametrize("check", SAME)
def test_same_verdict(check: str) -> None:
    data: dict[str, Any] = {
        "x": LOSS,
        "ray/g": {0: 1.0, 10: 55.0, 20: 52.0},
        "validation/loss": {0: 9.0, 10: 3.0, 20: 2.0, 30: 1.0},
    }
    assert our_verdict(check, data) == field_verdict(check, data)
