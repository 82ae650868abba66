# SPDX-License-Identifier: Apache-2.0
"""Canaries of a suite: which pairs and cases they become."""

from __future__ import annotations

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan.lint import lint_plan
from lora_suite.plan.model import Canary, Case
from tests.plan.conftest import Project

CPU, GPU = "sft-a-1n2c-fsdp2", "sft-a-1n2g-fsdp2"
HEAD = "name: x\nrepeats: 2\n"
SAME = f"canaries:\n- {{kind: same, case: {CPU}}}\n"
SLOWER = f"- {{kind: slower, case: {CPU}}}\n"
INJECTED = f"- {{kind: injected, case: {CPU}, factor: 1.02, name: two percent}}\n"


@pytest.fixture
def cases(project: Project) -> Project:
    project.case(CPU)
    project.case(GPU)
    return project


def test_each_kind_is_a_pair_of_one_case_with_itself(cases: Project) -> None:
    plan = cases.plan(HEAD + SAME + SLOWER + INJECTED)
    same, slower, injected = plan.pairs
    assert same.arms == {"normal": CPU, "again": CPU}
    assert slower.arms == {"normal": CPU, "slowed": f"{CPU}-slowed"}
    assert injected.arms == {"normal": CPU, "slowed": CPU}
    assert [pair.name for pair in plan.pairs] == [f"canary same {CPU}", f"canary slower {CPU}", "two percent"]
    assert not any(pair.not_comparable for pair in plan.pairs)
    # The injected one is judged on the runs of the first.
    assert [run.pair for run in plan.runs] == [same.name] * 8 + [slower.name] * 8
    assert [run.arm for run in plan.runs[:4]] == ["normal", "again", "again", "normal"]
    assert [run.repeat for run in plan.runs[:8]] == list(range(1, 9))


def test_the_slowed_case_is_slow_on_purpose_and_has_no_limits(cases: Project) -> None:
    plan = cases.plan(HEAD + "cases:\n- {case: " + CPU + ", checks: ['1 < 2']}\n" + SAME + SLOWER)
    slowed = plan.cases[f"{CPU}-slowed"]
    assert isinstance(slowed, Case)
    assert slowed.recipe.debug.faults.slow_step == 3.0
    assert slowed.overrides == ("debug.faults.slow_step=3.0",)
    assert slowed.checks == ()
    assert len(plan.cases[CPU].checks) == 2
    assert [fault.key for fault in plan.pairs[1].faults] == ["debug.faults.slow_step"]


@pytest.mark.parametrize(
    ("stem", "kind", "factor"),
    [(CPU, "same", 1.5), (CPU, "slower", 3.0), (GPU, "same", 1.02), (GPU, "slower", 1.02)],
)
def test_factors_are_what_the_machine_can_tell(cases: Project, stem: str, kind: str, factor: float) -> None:
    plan = cases.plan(f"{HEAD}canaries:\n- {{kind: {kind}, case: {stem}}}\n")
    assert plan.pairs[0].canary == Canary(kind, factor)  # type: ignore[arg-type]


def test_equal_arms_are_asked_in_both_directions(cases: Project) -> None:
    (pair,) = cases.plan(f"{HEAD}canaries:\n- {{kind: same, case: {CPU}, factor: 1.25}}\n").pairs
    time = '"timing/train/step_time"'
    assert pair.checks == (
        f"ratio(again[{time}], normal[{time}]) < 1.25",
        f"ratio(again[{time}], normal[{time}]) > 0.8",
    )


def test_a_canary_has_nothing_for_lint_to_say(cases: Project) -> None:
    plan = cases.plan(HEAD + SAME + SLOWER + INJECTED)
    assert [finding for finding in lint_plan(plan) if finding.severity == "error"] == []


def test_it_is_selected_by_its_name_or_its_case_with_all_of_that_case(cases: Project) -> None:
    text = HEAD + f"cases: [{CPU}, {GPU}]\n" + SAME + INJECTED
    assert len(cases.plan(text, select="percent").pairs) == 2
    assert [pair.name for pair in cases.plan(text, select="2g").pairs] == []


def test_overrides_of_the_command_line_are_for_both_arms(cases: Project) -> None:
    plan = cases.plan(HEAD + SAME + SLOWER, overrides=["sft.seed=7"])
    assert all(case.tree["sft"]["seed"] == 7 for case in plan.cases.values())
    assert not plan.pairs[1].not_comparable


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"canaries:\n{INJECTED}", "judged on the runs of a canary of kind same"),
        (f"canaries:\n- {{kind: sideways, case: {CPU}}}\n", "kind"),
        (f"canaries:\n- {{kind: same, case: {CPU}, factor: 0.9}}\n", "factor"),
        (f"canaries:\n- {{kind: same, case: {CPU}, repeats: 1}}\n", "repeats"),
        (f"canaries:\n- {{kind: same, case: {CPU}, repeat: 4}}\n", "did you mean repeats?"),
        (SAME + SAME.removeprefix("canaries:\n"), "stands twice"),
        ("canaries:\n- {kind: same, case: sft-b-1n2c-fsdp2}\n", "there is no"),
    ],
)
def test_what_is_wrong_is_named(cases: Project, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        cases.plan(HEAD + text)


def test_nothing_slows_another_trainer_down(cases: Project) -> None:
    external = (
        "cases:\n- case: theirs\n  external: {command: [x], cwd: ., outputs: [out], metrics: out/m.json, "
        "steps: 3, minutes: 1, gpus: 1}\n"
    )
    with pytest.raises(ConfigError, match="nothing can slow it down"):
        cases.plan(HEAD + external + "canaries:\n- {kind: slower, case: theirs}\n")
    plan = cases.plan(HEAD + external + "canaries:\n- {kind: same, case: theirs}\n")
    assert [run.pair for run in plan.runs] == ["canary same theirs"] * 8 + [None] * 2
