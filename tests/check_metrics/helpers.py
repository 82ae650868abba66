# SPDX-License-Identifier: Apache-2.0
"""Short ways to build series and to judge a check on them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from check_metrics import CheckResult, Series, evaluate, load_metrics, parse

Steps = Mapping[int, float | None] | list[float]


def series(name: str, values: Steps) -> Series:
    """A series of {step: value}, or of values from step 1 on; None is nan."""
    pairs = dict(enumerate(values, start=1)) if isinstance(values, list) else dict(sorted(values.items()))
    numbers = tuple(float("nan") if value is None else float(value) for value in pairs.values())
    return Series(name, tuple(pairs), numbers)


def judge(check: str, data: Mapping[str, Steps], **options: Any) -> CheckResult:
    """The verdict on one arm, `data`."""
    return judge_arms(check, {"data": data}, **options)


def judge_arms(check: str, arms: Mapping[str, Mapping[str, Steps]], **options: Any) -> CheckResult:
    """The verdict on several arms."""
    built = {arm: {name: series(name, steps) for name, steps in data.items()} for arm, data in arms.items()}
    return evaluate(parse(check), built, **options)


def write_metrics(path: Path, data: Mapping[str, Mapping[int, Any]]) -> Path:
    """A metrics file in the common shape."""
    document = {name: {str(step): value for step, value in steps.items()} for name, steps in data.items()}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def judge_text(check: str, text: str, path: Path, **options: Any) -> CheckResult:
    """The verdict on a metrics file with this text."""
    path.write_text(text, encoding="utf-8")
    return evaluate(parse(check), {"data": load_metrics(path)}, **options)
