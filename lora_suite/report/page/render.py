# SPDX-License-Identifier: Apache-2.0
"""Renders the page: views of the verdict into one template, style and script within it."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.report.page.case_view import case_view
from lora_suite.report.page.pair_view import pair_view
from lora_suite.report.problems import health_flags, problems
from lora_suite.report.reproduce import command
from lora_suite.report.terminal import STYLES
from lora_suite.report.words import count, detects, duration, figure, interval, outcome

if TYPE_CHECKING:
    from jinja2 import Environment


def render(verdict: SuiteVerdict) -> str:
    """The page, complete in itself: it loads nothing, and runs no script but its own."""
    environment = _environment()
    script = environment.loader.get_source(environment, "page.js")[0] if environment.loader else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    counts = Counter(verdict.states)
    page = environment.get_template("page.html.jinja").render(
        verdict=verdict,
        state=outcome(verdict),
        counts=[(state, counts[state]) for state in STYLES if counts[state]],
        problems=problems(verdict, brief=True),
        cases=[case_view(verdict, case) for case in dict.fromkeys(run.case for run in verdict.runs)],
        pairs=[pair_view(verdict, pair) for pair in verdict.pairs],
        health=health_flags(verdict.runs),
        command=command(verdict),
        script=script,
        script_digest=digest,
    )
    # A log may hold halves of a character, which no file can.
    return page.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lora_suite.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    environment.filters["duration"] = duration
    environment.globals |= {"count": count, "detects": detects, "interval": interval}
    return environment


def _figure(value: float | None, form: str = "") -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form) if form else figure(value)
