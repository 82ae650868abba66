# SPDX-License-Identifier: Apache-2.0
"""Tiers and owners of a suite's cases and pairs, and `-m`."""

from __future__ import annotations

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.select import parse_tiers
from tests.plan.conftest import Project

FULL = "sft-tiny-llama-1n2c-fsdp2-mine"
LORA = "sft-tiny-llama-1n2c-fsdp2-lora-mine"
ALONE = "sft-tiny-llama-1n2c-fsdp2-other"
SUITE = f"""name: Test
owner: suite-team
pairs:
  - {{name: quick, arms: {{full: {FULL}, lora: {LORA}}}, tier: pr, owner: pair-team}}
  - {{name: again, arms: {{a: {LORA}, b: {FULL}}}, reuse: true, checks: ['1 < 2'], tier: release}}
cases:
  - {{case: {FULL}, owner: case-team}}
  - {ALONE}
"""


@pytest.fixture
def cases(project: Project) -> Project:
    project.case(FULL)
    project.case(LORA, "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n")
    project.case(ALONE)
    return project


@pytest.mark.parametrize(
    ("tiers", "pairs", "runs"),
    [
        (None, ["quick", "again"], {FULL, LORA, ALONE}),
        ("pr", ["quick"], {FULL, LORA}),
        # What says nothing is due every night; an arm's case only with its pair.
        ("nightly", [], {ALONE}),
        # Nobody else makes its runs tonight, so it makes them itself.
        ("release", ["again"], {FULL, LORA}),
        ("pr or release", ["quick", "again"], {FULL, LORA}),
        ("not pr", ["again"], {FULL, LORA, ALONE}),
    ],
)
def test_tier_selects(cases: Project, tiers: str | None, pairs: list[str], runs: set[str]) -> None:
    plan = cases.plan(SUITE, tiers=tiers)
    assert [pair.name for pair in plan.pairs] == pairs
    assert {run.case for run in plan.runs} == runs


def test_tier_and_name_must_both_hold(cases: Project) -> None:
    assert [pair.name for pair in cases.plan(SUITE, tiers="pr", select="quick").pairs] == ["quick"]
    with pytest.raises(ConfigError, match=r"-k 'again' -m 'pr' matches nothing"):
        cases.plan(SUITE, tiers="pr", select="again")


def test_tier_of_the_suite_is_that_of_all_that_say_nothing(cases: Project) -> None:
    plan = cases.plan(f"tier: release\n{SUITE}", tiers="release")
    assert {run.case for run in plan.runs} == {FULL, LORA, ALONE}


def test_tier_decides_of_canaries_too(cases: Project) -> None:
    text = f"name: T\ncases: [{ALONE}]\ncanaries: [{{kind: same, case: {FULL}, tier: release}}]\n"
    assert cases.plan(text, tiers="nightly").pairs == ()
    assert len(cases.plan(text, tiers="release").pairs) == 1


def test_owner_is_the_nearest_that_is_named(cases: Project) -> None:
    plan = cases.plan(SUITE)
    owners = {stem: case.owner for stem, case in plan.cases.items()}
    assert owners == {FULL: "case-team", LORA: "pair-team", ALONE: "suite-team"}
    assert [pair.owner for pair in plan.pairs] == ["pair-team", "suite-team"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nihgtly", "-m 'nihgtly': there is no tier 'nihgtly'; there are pr, nightly, release"),
        ("pr or", "-m 'pr or': something is missing at the end"),
    ],
)
def test_unusable_tier_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tiers(text)


def test_unknown_tier_in_a_suite_names_its_line(cases: Project) -> None:
    with pytest.raises(ConfigError, match=r"test\.yaml:2: tier: Input should be 'pr', 'nightly'"):
        cases.plan(f"name: T\ntier: weekly\ncases: [{ALONE}]\n")
