# SPDX-License-Identifier: Apache-2.0
"""`--plan`: everything that would happen and what it costs, and no run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_suite.campaign import run as campaign
from lora_suite.campaign.preview import preview
from lora_suite.campaign.run import Request
from lora_suite.config.errors import ConfigError
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.plan.lint import Finding
from lora_suite.plan.load import load_plan
from lora_suite.plan.model import DeclaredCheck, Difference
from tests.campaign.helpers import console, printed
from tests.judge.helpers import FULL, LORA, LOSS_FALLS, RATIO, ROOT, make_case, make_pair, make_plan


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """Print a plan; returns the exit code and the lines."""

    def show(plan, *findings: Finding) -> tuple[int, list[str]]:
        monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: plan)
        monkeypatch.setattr(campaign, "lint_plan", lambda plan: [*findings])
        screen = console()
        code = preview(Request(Path("suites/smoke.yaml"), results=tmp_path / "results"), screen)
        assert not (tmp_path / "results").exists()
        return code, printed(screen).splitlines()

    return show


def test_runs_stand_in_their_order(shown):
    code, lines = shown(make_plan())
    assert code == 0
    runs = [line.split()[1:4] for line in lines if ", arm " in line]
    assert runs[:3] == [[FULL, "run", "1"], [LORA, "run", "1"], [FULL, "run", "2"]]
    assert len(runs) == 8


@pytest.mark.parametrize("width", [80, 160])
def test_on_a_terminal_lines_are_folded_between_words_and_lose_none(monkeypatch, tmp_path, width):
    plan = make_plan()
    monkeypatch.setattr("lora_suite.campaign.request.load_plan", lambda path, **options: plan)
    monkeypatch.setattr(campaign, "lint_plan", lambda plan: [])
    request = Request(Path("suites/smoke.yaml"), results=tmp_path / "results")
    whole, folded = console(), console(width, terminal=True)
    assert preview(request, whole) == preview(request, folded) == 0
    assert printed(folded).split() == printed(whole).split()
    assert max(map(len, printed(folded).splitlines())) <= width
    assert max(map(len, printed(whole).splitlines())) > 160
    invariants = printed(folded).split("    LoRA invariants: ")[1].splitlines()
    assert invariants[1].startswith("        ")


def test_the_cost_is_exact(shown):
    # 8 runs × 3 minutes = 24 minutes; on 2 processes each 0.8 GPU-hours.
    _, lines = shown(make_plan(budget_gpu_hours=1.0))
    assert lines[-1] == "at most 24 minutes and 0.8 GPU-hours of 1 allowed, in 8 runs"


def test_the_memory_of_a_large_model_is_told(shown):
    stem = "sft-llama3.1-8b-1n8g-fsdp2tp1-lora"
    large = make_case(stem)
    _, lines = shown(
        make_plan(make_pair(arms={"full": FULL, "lora": stem}), cases={FULL: make_case(), stem: large})
    )
    (line,) = [line for line in lines if "memory model" in line]
    assert line.startswith("    weights sharded over 8 ranks (fsdp); the memory model expects ")
    assert line.endswith(") a rank on the plain path; sharding: auto shards less where the GPU has room")


def test_the_memory_of_a_required_fast_path_is_that_of_the_fast_path(shown):
    """Full SFT of the 8B on one GPU does not fit the plain path (131.7 GiB of 141), and is not asked to."""
    stem = "sft-llama3.1-8b-1n1g-fsdp2"
    large = make_case(stem)
    required = large.recipe.policy.model_copy(update={"require_fast_path": True})
    large = replace(large, recipe=large.recipe.model_copy(update={"policy": required}))
    _, lines = shown(
        make_plan(make_pair(arms={"full": stem, "lora": LORA}), cases={stem: large, LORA: make_case(LORA)})
    )
    (line,) = [line for line in lines if "memory model" in line]
    # Weights 2, what they lack of their masters 2 and moments 8 bytes of each of 8.03 billion parameters.
    assert "(weights 15.0, optimizer 74.8, " in line
    assert line.endswith(" a rank on the fast path")


def test_what_will_be_judged_is_named(shown):
    checks = (
        DeclaredCheck(LOSS_FALLS, line=6),
        DeclaredCheck("a", line=7, when="policy.init=pretrained"),
        DeclaredCheck("b", line=8, on="H200"),
    )
    plan = make_plan(cases={FULL: make_case(FULL, checks), LORA: make_case(LORA, ())})
    text = [line.strip() for line in shown(plan)[1]]
    assert LOSS_FALLS in text
    assert "a  (when policy.init=pretrained)" in text
    assert "b  (on H200)" in text
    assert RATIO in text
    assert f"LoRA invariants: {', '.join(REQUIRED_INVARIANTS)}" in text


def test_the_arms_differences_are_listed(shown):
    _, lines = shown(make_plan())
    assert "    differs: policy.dtensor_cfg.lora_cfg.enabled (False and True)" in lines


def test_arms_that_cannot_be_compared_are_exit_5(shown):
    key = "policy.dtensor_cfg.lora_cfg.enabled"
    code, lines = shown(make_plan(make_pair(not_comparable=(Difference(key, False, True),))))
    assert code == 5
    assert f"    NOT ALLOWED: {key} (False and True)" in lines
    assert lines[-2] == ("    INCOMPARABLE: make the arms equal in these keys, or allow them in the suite")


def test_arms_that_are_no_pair_by_the_suites_word_are_exit_5_too(shown):
    differing = (Difference("policy.dtensor_cfg.lora_cfg.enabled", False, True),)
    code, lines = shown(make_plan(make_pair(not_comparable=differing, comparable=False)))
    assert code == 5
    assert lines[-2] == "    INCOMPARABLE: the suite shows this pair for that"


def test_errors_of_lint_are_refused_after_printing(shown):
    finding = Finding(Path("suites/smoke.yaml"), 0, "error", "budget", "too much")
    with pytest.raises(ConfigError, match=r"suites/smoke\.yaml: error: too much"):
        shown(make_plan(), finding)


def test_warnings_of_lint_come_last(shown):
    code, lines = shown(make_plan(), Finding(Path("a.sh"), 3, "warning", "no-margin", "narrow"))
    assert (code, lines[-1]) == (0, "a.sh:3: warning: narrow [no-margin]")


def test_over_budget_is_an_error_of_lint(monkeypatch):
    """The suite of this repository, with a budget below its 1.6 GPU-hours: found by the real lint."""
    plan = load_plan(ROOT / "suites" / "smoke.yaml")
    monkeypatch.setattr(
        "lora_suite.campaign.request.load_plan", lambda path, **options: replace(plan, budget_gpu_hours=1.5)
    )
    with pytest.raises(ConfigError, match=r"1\.6 GPU-hours, over its budget of 1\.5"):
        preview(Request(plan.path), console())
