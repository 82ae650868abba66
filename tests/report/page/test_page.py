# SPDX-License-Identifier: Apache-2.0
"""The page as text: whole, linked, escaped, complete in itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from lora_suite.judge.verdict import CaseHistory, PairCheckVerdict, Points, SuiteVerdict
from lora_suite.report.page import render
from lora_suite.report.problems import problems
from tests.report.helpers import CASES, RATIO, check, curves, pair, run, suite
from tests.report.nights import night
from tests.report.page.reader import Reader

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp; {{ 7 * 7 }} {% raw %}"


@pytest.fixture(scope="module")
def full() -> SuiteVerdict:
    """A verdict with everything a page can draw."""
    return night(pairs=3)


@pytest.fixture(scope="module")
def page(full) -> Reader:
    """Its page."""
    return Reader(render(full))


def test_every_tag_is_closed_and_every_id_is_there_once(page):
    assert page.problems == []
    assert len(page.ids) == len(set(page.ids))


def test_every_link_leads_into_the_page(page):
    inside = [link[1:] for link in page.links if link.startswith("#")]
    assert set(inside) <= set(page.ids)
    assert [link for link in page.links if not link.startswith("#")] == ["data:,"]


def test_everything_that_did_not_pass_is_linked_from_the_top(full, page):
    anchors = [problem.anchor for problem in problems(full, brief=True)]
    assert len(anchors) == 4
    # The list of problems comes before any table.
    first = [link[1:] for link in page.links if link.startswith("#")]
    assert [link for link in first if link in anchors][:4] == anchors
    assert {anchor.partition("-")[0] for anchor in anchors} == {"check", "run", "pair"}


def test_what_the_page_shows(page):
    for words in (
        "out of memory: rank 3, step 17",
        "torch.OutOfMemoryError: CUDA out of memory",
        "only the LoRA arm moved against the baseline of 2026-02-20",
        "GPU 3 was throttled for heat in 12 of 40 samples",
        "lora-suite run suites/nightly.yaml policy.init=random",
        "NVIDIA H200",
        "0.8447 [0.8408, 0.8487] is beyond the limit < 0.8",
        "Commits: 8f2c41d9..c03d5e7a",
        "above the control limit",
        "paired t with a prior of 12 degrees of freedom",
        "scripts/sft-llama3.1-8b-1n8g-fsdp2-lora.sh:6",
        "Left out: 3 of the first steps.",
        "× floor, bound by",
    ):
        assert words in page.text, words


@pytest.mark.parametrize(
    ("title", "count"),
    [
        ("lora/full and its 95 % interval", 3),
        ("Each step: lora against full", 3),
        ("Repeat 1: lora/full by step", 3),
        ("Phases of the arm that moved: the baseline of 2026-02-20 to now", 1),
        ("Phases of a step: full to lora", 3),
        ("Loss of the arms", 3),
        ("Memory of the arms (in use on the fullest device)", 3),
        ("timing/train/step_time (s) over 60 runs", 6),
    ],
)
def test_charts(full, title, count):
    assert render(full).count(f"<figcaption>{title}</figcaption>") == count


def test_every_chart_is_told_in_words(full):
    charts = re.findall(r"<svg [^>]*>", render(full))
    assert all('role="img" aria-label="' in chart for chart in charts)


def test_of_several_devices_the_fullest_is_drawn(full):
    memory = [curve for curve in re.findall(r'data-values="([^"]+)"', render(full)) if curve.endswith(" 62")]
    assert memory
    assert "60.76" not in render(full)


@pytest.mark.parametrize(
    "verdict",
    [
        suite(),
        suite(runs=[], pairs=[]),
        suite(interrupted=True, runs=[run(state="MISSING", own_state="MISSING", message="did not run")]),
        suite(pairs=[curves()]),
        suite(pairs=[pair(checks=[], state="INCOMPARABLE", own_state="INCOMPARABLE", message="they differ")]),
        suite(pairs=[pair(checks=[PairCheckVerdict(expression="ratio(", state="ERROR")], state="ERROR")]),
        suite(history=[CaseHistory(case=CASES[0], metric="m", environment="e", nights=[])]),
        suite(runs=[run(repeat=0), run(series={"train/loss": Points(at=[], values=[])})]),
    ],
    ids=["green", "nothing", "interrupted", "curves", "no check", "unreadable", "no nights", "no points"],
)
def test_a_verdict_with_little_in_it(verdict):
    read = Reader(render(verdict))
    assert read.problems == []
    assert len(read.ids) == len(set(read.ids))


def test_a_verdict_of_the_first_version():
    old = json.loads(suite().model_dump_json())
    old["schema_version"] = 1
    for key in ("history", "command", "environments"):
        del old[key]
    for each in old["runs"]:
        for key in ("phases", "series", "health", "environment", "code"):
            del each[key]
    for each in old["pairs"]:
        del each["attribution"]
        for one in each["checks"]:
            del one["matched"]
            if one["effect"]:
                del one["effect"]["ratios"], one["effect"]["method"]
    read = Reader(render(SuiteVerdict.model_validate(old)))
    assert read.problems == []
    assert "lora-suite run suites/smoke.yaml" in read.text


def test_nothing_in_a_verdict_becomes_markup():
    verdict = night(pairs=2)
    clean = Reader(render(verdict))
    verdict.suite = verdict.started = verdict.directory = verdict.command = EVIL
    verdict.environments = {EVIL: {EVIL: EVIL}}
    for each in verdict.runs:
        each.message, each.health, each.code, each.not_judged = f"{EVIL}\n  {EVIL}", [EVIL], EVIL, [EVIL]
        for one in each.checks:
            one.value, one.message, one.source = EVIL, EVIL, EVIL
    for each in verdict.pairs:
        each.message, each.notes = EVIL, [EVIL]
        for one in each.checks:
            one.value, one.message = EVIL, EVIL
    for each in verdict.history:
        each.alert = EVIL
        for night_ in each.nights:
            night_.started = night_.code = EVIL
    page = render(verdict)
    read = Reader(page)
    assert read.problems == []
    assert read.tags["script"] == clean.tags["script"] == 1
    assert read.tags["img"] == 0
    assert "onerror" not in read.attributes
    assert "{{ 7 * 7 }}" in read.text


def test_names_of_cases_checks_and_metrics_are_escaped_too():
    verdict = suite(
        runs=[run(EVIL, checks=[check("FAIL", name=EVIL)], series={EVIL: Points(at=[1, 2], values=[1, 2])})],
        pairs=[pair(EVIL, arms={EVIL: EVIL}, checks=[PairCheckVerdict(expression=EVIL, state="FAIL")])],
    )
    read = Reader(render(verdict))
    assert read.problems == []
    assert (read.tags["script"], read.tags["img"]) == (1, 0)


def test_only_the_script_of_the_page_may_run():
    page = render(suite())
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in page or f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


def test_half_a_character_in_a_log_does_not_stop_the_page():
    verdict = suite(runs=[run(state="ERROR", own_state="ERROR", message="\ud800 \x00 \x1b[31m", checks=[])])
    assert render(verdict).encode()


def test_ids_of_cases_with_similar_names_differ():
    read = Reader(render(suite(runs=[run("a.b"), run("a b"), run("a-b"), run("A-B"), run("é"), run("ü")])))
    cases = [each for each in read.ids if each.startswith("case-")]
    assert len(set(cases)) == 6


def test_thirty_cases_are_far_below_six_megabytes():
    page = render(night(pairs=15))
    assert len(set(re.findall(r'id="(case-[^"]+)"', page))) == 30
    assert len(page.encode()) < 2_000_000


def test_the_limit_is_drawn_where_a_ratio_has_one(full):
    assert RATIO not in render(full)
    assert "limit (y = 0.8 x)" in render(full)
