# SPDX-License-Identifier: Apache-2.0
"""The verdict as JUnit XML for CI servers: a test case for every run, check, invariant and pair check."""

from __future__ import annotations

import re

from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

from lora_suite.judge.verdict import PairCheckVerdict, PairVerdict, RunVerdict, State, SuiteVerdict
from lora_suite.report.evidence import cause, runs_by_case
from lora_suite.report.words import detects

# Control characters (colours of a quoted log) that XML 1.0 cannot hold at all.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(verdict: SuiteVerdict) -> str:
    """JUnit XML: one test suite a case and a pair. FAIL is a failure; all else but PASS is an error."""
    xml = JUnitXml(name=verdict.suite)
    for case, runs in runs_by_case(verdict.runs).items():
        suite = TestSuite(case)
        for run in runs:
            suite.add_testcases(_run_cases(run))
        xml.add_testsuite(suite)
    for pair in verdict.pairs:
        suite = TestSuite(f"pair {pair.name}")
        suite.add_testcases(_pair_cases(pair))
        xml.add_testsuite(suite)
    xml.update_statistics()  # type: ignore[no-untyped-call]
    content: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return content.decode("utf-8")


def _run_cases(run: RunVerdict) -> list[TestCase]:
    told = "\n".join([*run.health, *run.notes])
    own = _case(run.case, f"run {run.repeat}", run.own_state, run.message, told)
    if run.seconds is not None:
        own.time = round(run.seconds, 3)
    return [
        own,
        *(
            _case(run.case, f"run {run.repeat}: {check.name}", check.state, check.message, check.value)
            for check in run.checks
        ),
    ]


def _pair_cases(pair: PairVerdict) -> list[TestCase]:
    return [
        _case(pair.name, "comparable and complete", pair.own_state, pair.message, "\n".join(pair.notes)),
        *(_case(pair.name, check.expression, check.state, *_told(pair, check)) for check in pair.checks),
    ]


def _told(pair: PairVerdict, check: PairCheckVerdict) -> tuple[str, str]:
    """A pair check's message, and its value with what is behind it."""
    found = [check.value]
    if check.effect is not None:
        found.append(f"detects {detects(check.effect.smallest_detectable)}")
    if check.state != "PASS" and pair.attribution is not None:
        found.append(f"cause: {cause(pair.attribution)}")
    return check.message, "\n".join(filter(None, found))


def _case(group: str, name: str, state: State, message: str, value: str = "") -> TestCase:
    case = TestCase(_text(name), classname=_text(group))
    if state != "PASS":
        kind = Failure if state == "FAIL" else Error
        result = kind(_text(message.partition("\n")[0]), state)
        result.text = _text(f"{message}\n{value}".strip())
        case.result = [result]
    elif value:
        case.system_out = _text(value)
    return case


def _text(text: str) -> str:
    return _NOT_XML.sub("?", text)
