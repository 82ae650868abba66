# SPDX-License-Identifier: Apache-2.0
"""JUnit XML, read back by two parsers."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from junitparser import Error, Failure, JUnitXml

from lora_suite.judge.verdict import PairCheckVerdict
from lora_suite.report.junit import render
from tests.report.helpers import CASES, RATIO, check, pair, run, suite


def test_every_run_check_and_pair_check_is_a_test_case():
    xml = JUnitXml.fromstring(render(suite()).encode())
    # 16 runs with one check each; 3 pairs with 1, 1 and 2 checks.
    assert xml.tests == 16 * 2 + 3 + 4
    assert (xml.failures, xml.errors, xml.skipped) == (0, 0, 0)
    assert [each.name for each in xml] == [*CASES, "pair fsdp2", "pair megatron", "pair backends"]
    first = next(iter(next(iter(xml))))
    assert (first.classname, first.name, first.time) == (CASES[0], "run 1", 8.25)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("FAIL", Failure),
        ("ERROR", Error),
        ("MISSING", Error),
        ("INCOMPARABLE", Error),
        ("INCONCLUSIVE", Error),
    ],
)
def test_what_is_not_pass_is_red(state, kind):
    verdict = suite(
        runs=[
            run(state=state, own_state=state, message="why\nlast line", checks=[]),
            run(repeat=2, state=state, checks=[check(state, message="why")]),
        ],
        pairs=[
            pair(state=state, checks=[PairCheckVerdict(expression=RATIO, state=state, message="why")]),
            pair(state=state, own_state=state, message="why", checks=[]),
        ],
    )
    xml = JUnitXml.fromstring(render(verdict).encode())
    red = [case.result[0] for each in xml for case in each if case.result]
    assert [type(result) for result in red] == [kind] * 4
    assert [(result.type, result.message) for result in red] == [(state, "why")] * 4
    assert "last line" in red[0].text


def test_values_and_notes_are_kept_in_full():
    text = render(suite(pairs=[pair(notes=["judged on 3 of 4 repeats"])]))
    assert "judged on 3 of 4 repeats" in text
    assert "0.9312" in text


def test_a_log_with_control_characters_is_still_xml():
    message = "\x1b[31mred\x1b[0m \x00 < & > ]]> \ud800"
    text = render(suite(runs=[run(state="ERROR", own_state="ERROR", message=message, checks=[])]))
    tree = ElementTree.fromstring(text.encode())
    (error,) = tree.iter("error")
    assert error.attrib["message"] == "?[31mred?[0m ? < & > ]]> ?"
