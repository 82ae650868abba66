# SPDX-License-Identifier: Apache-2.0
"""Each rule against a project in which exactly that is wrong."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path

import pytest

from check_metrics import Series, evaluate, parse
from lora_suite.config import ConfigError
from lora_suite.launch import starter
from lora_suite.plan.driver import read_driver
from lora_suite.plan.lint import Finding, blocking, lint, lint_plan
from lora_suite.plan.load import load_plan
from tests.plan.conftest import BASE, SIMPLE, Project

ROOT = Path(__file__).resolve().parents[3]
LORA = "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n"
TODAY = date(2026, 11, 30)
PAIR = f"name: x\npairs:\n- name: p\n  arms: {{full: {BASE}, lora: {BASE}-lora}}\n"


@pytest.fixture
def clean(project: Project) -> Project:
    """A project without findings: a full and a LoRA case, paired."""
    project.case(BASE)
    project.case(f"{BASE}-lora", LORA)
    project.suite(PAIR)
    return project


def findings(project: Project) -> list[Finding]:
    return lint([project.root], TODAY)


def only(project: Project) -> Finding:
    """The one finding of a project."""
    found = findings(project)
    assert len(found) == 1, [str(each) for each in found]
    return found[0]


def driver(*checks: str, declare: str = "declare_case steps=30 minutes=3") -> str:
    """A driver's body with these lines at its end."""
    return "\n".join([declare, 'train "$@"', *checks]) + "\n"


def test_clean_project_has_no_findings(clean: Project) -> None:
    assert findings(clean) == []


@pytest.mark.slow
def test_starter_set_has_no_findings(tmp_path: Path) -> None:
    starter.init(tmp_path)
    assert lint([tmp_path], TODAY) == []


@pytest.mark.parametrize(
    ("stem", "recipe"),
    [
        ("sft-tiny-llama-2n2c-fsdp2", ""),
        ("sft-tiny-llama-1n4c-fsdp2", ""),
        ("sft-tiny-llama-1n2c-megatron-tp2", ""),
        ("sft-tiny-llama-1n2c-fsdp2-lora", ""),
        (BASE, LORA),
        ("my-favourite-recipe", ""),
    ],
)
def test_name_against_what_it_resolves_to(project: Project, stem: str, recipe: str) -> None:
    project.case(stem, recipe)
    found = only(project)
    assert (found.rule, found.severity, found.file.name) == ("name", "error", f"{stem}.yaml")


def test_name_is_compared_without_case(project: Project) -> None:
    project.case("sft-Tiny-Llama-1n2C-FSDP2")
    assert findings(project) == []


def test_recipe_that_does_not_resolve(clean: Project) -> None:
    clean.case(BASE, "policy:\n  train_micro_batch_sise: 3\n")
    # The suite and the driver meet the same fault; it is one finding, the recipe's.
    found = only(clean)
    assert (found.rule, found.line, found.file.name) == ("recipe", 3, f"{BASE}.yaml")
    assert "train_micro_batch_size" in found.message


def test_recipe_that_its_model_refuses(project: Project) -> None:
    project.case(BASE, "policy: {train_global_batch_size: 15}\n")
    assert only(project).rule == "recipe"


def test_recipe_without_driver(clean: Project) -> None:
    stem = f"{BASE}-other"
    clean.case(stem)
    (clean.root / "scripts" / f"{stem}.sh").unlink()
    found = only(clean)
    assert (found.rule, found.file.stem) == ("recipe-without-driver", stem)


def test_parent_of_other_recipes_needs_neither_driver_nor_name(clean: Project) -> None:
    parent = clean.root / "recipes" / "base.yaml"
    shutil.copy(clean.root / "recipes" / f"{BASE}.yaml", parent)
    assert findings(clean) != []
    (clean.root / "recipes" / f"{BASE}.yaml").write_text("defaults: base.yaml\n")
    assert findings(clean) == []


def test_driver_without_recipe(clean: Project) -> None:
    shutil.copy(clean.root / "scripts" / f"{BASE}.sh", clean.root / "scripts" / "sft-x-1n1g-fsdp2.sh")
    found = only(clean)
    assert (found.rule, found.file.stem) == ("driver-without-recipe", "sft-x-1n1g-fsdp2")


@pytest.mark.parametrize(
    "body", ["declare_case steps=30 minutes=0\n", "declare_case steps=30 minutes=3\n", "exit 1\n"]
)
def test_driver_that_does_not_plan(project: Project, body: str) -> None:
    project.case(BASE, driver=body)
    assert only(project).rule == "driver"


def test_declared_steps_against_the_recipe(project: Project) -> None:
    project.case(BASE, driver=SIMPLE.replace("steps=30", "steps=40"))
    found = only(project)
    assert found.rule == "steps"
    assert "steps=40, but the recipe trains 30" in found.message


@pytest.mark.parametrize(
    ("check", "rule"),
    [
        ('mean(data["train/loss"] < 3', "unparsable-check"),
        ('data["train/loss"]["30"]', "unparsable-check"),
        ('__import__("os").getcwd() == "/"', "unparsable-check"),
        ('mean(lora["train/loss"]) < 3', "unknown-arm"),
        ('data["train/los"]["30"] < 3', "unknown-metric"),
        ('worst("ray/node.*.gpu.*.mem") < 3', "unknown-metric"),
        ('data["train/loss"]["31"] < 3', "unreachable-step"),
        ('mean(data["timing/train/step_time"], 31) < 1', "unreachable-step"),
        ('mean(data["timing/train/step_time"], 2, 33) < 1', "unreachable-step"),
        # The tiny recipes validate at steps 10, 20, 30, and not before the first.
        ('data["validation/loss"]["15"] < 3', "unreachable-step"),
        ('data["validation/loss"]["0"] < 9', "unreachable-step"),
        ('count(data["train/loss"]) > 0', "cannot-fail"),
        ('min(data["train/grad_norm"]) >= 0', "cannot-fail"),
        ('data["lora/layer_coverage"]["30"] <= 1', "cannot-fail"),
        ('max(data["train/loss"]) < 5 or max(data["train/loss"]) >= 5', "cannot-fail"),
        ('mean(data["timing/train/step_time"], 2) < 60', "minutes"),
        ('data["train/loss"]["30"] == 2.25', "no-margin"),
    ],
)
def test_check(project: Project, check: str, rule: str) -> None:
    project.case(BASE, driver=driver("", f"check '{check}'"))
    found = only(project)
    # Two lines of head, declare_case, train, an empty line.
    assert (found.rule, found.line, found.file.name) == (rule, 6, f"{BASE}.sh")


@pytest.mark.parametrize(
    "check",
    [
        'data["validation/loss"]["20"] < 3',
        'worst("ray/node.*.gpu.*.mem_gb") < 60',
        'max(data["ray/node.1.gpu.7.mem_gb"]) < 60',
        'mean(data["timing/train/total_step_time"], 2) < 1',
        'mean(data["timing/train/step_time"], -6, -1) < 1',
        'data["lora/grad_coverage"]["30"] == 1',
        'count(data["train/loss"]) == 30',
        'all_finite(data["train/loss"])',
        'last(data["train/loss"]) / first(data["train/loss"]) < 0.8',
        'slope(data["train/loss"]) < 0',
        'std(data["train/loss"]) < 1',
        'ratio_above(data["train/loss"], 5) < 0.02',
        '0 < mean(data["train/loss"]) < 5',
        'not data["train/loss"]["30"] > 5',
        'abs(data["train/loss"]["30"] - 2.2) < 0.1',
        'max_rel_diff(data["train/loss"], data["validation/loss"]) < 0.5',
    ],
)
def test_check_that_is_fine(project: Project, check: str) -> None:
    project.case(BASE, driver=driver(f"check '{check}'"))
    assert findings(project) == []


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("sft-*.sh")), ids=lambda path: path.stem)
def test_every_check_that_ships_turns_red_on_nan_and_on_nothing(path: Path) -> None:
    for check in read_driver(path).checks:
        expression = parse(check.expression)
        names = [metric.replace("*", "0") for _, metric in expression.metrics]
        steps = tuple(range(1, 61))
        for values in ((float("nan"),) * 60, ()):
            series = {name: Series(name, steps[: len(values)], values) for name in names}
            assert evaluate(expression, {"data": series}).status == "FAIL"
        assert evaluate(expression, {"data": {}}).status == "FAIL"


def test_minutes_count_steps_limit_and_start(project: Project) -> None:
    # 30 steps of up to 10 s are 5 minutes, and 2 to start.
    check = "check 'mean(data[\"timing/train/step_time\"], 2) < 10'"
    project.case(BASE, driver=driver(check, declare="declare_case steps=30 minutes=7"))
    assert findings(project) == []
    project.case(BASE, driver=driver(check, declare="declare_case steps=30 minutes=6.9"))
    assert "need 7" in only(project).message


def test_condition_on_a_key_that_recipes_lack(project: Project) -> None:
    project.case(BASE, driver=driver('check --when policy.inti=random \'data["train/loss"]["30"] < 5\''))
    found = only(project)
    assert found.rule == "condition"
    assert "did you mean policy.init?" in found.message


def waived(until: str, revert_to: str = 'data["train/loss"]["30"] < 3', live: str = "") -> str:
    live = live or 'data["train/loss"]["30"] < 5'
    return driver(
        f"waive reason=slow issue=https://example.org/1 owner=ann until={until} revert_to='{revert_to}'",
        f"check '{live}'",
    )


def test_expired_waiver(project: Project) -> None:
    project.case(BASE, driver=waived("2026-11-29"))
    found = only(project)
    assert (found.rule, found.severity, found.line) == ("waiver-expired", "warning", 5)
    assert "ann, https://example.org/1" in found.message
    project.case(BASE, driver=waived("2026-11-30"))
    assert findings(project) == []


@pytest.mark.parametrize("live", ['data["train/loss"]["30"] < 3', 'data["train/loss"]["30"]  <  3.0'])
def test_waiver_whose_limit_is_back_already(project: Project, live: str) -> None:
    project.case(BASE, driver=waived("2099-01-01", live=live))
    assert only(project).rule == "waiver-without-effect"


def test_limit_to_return_to_is_a_check_like_any_other(project: Project) -> None:
    project.case(BASE, driver=waived("2099-01-01", revert_to='data["train/los"]["30"] < 3'))
    assert only(project).rule == "unknown-metric"


def test_unquoted_arguments(project: Project) -> None:
    project.case(BASE, driver=SIMPLE.replace('"$@"', "$@"))
    found = only(project)
    assert (found.rule, found.severity, found.line) == ("unquoted-arguments", "warning", 4)


def test_pipe_before_pipefail(project: Project) -> None:
    project.case(BASE)
    path = project.root / "scripts" / f"{BASE}.sh"
    path.write_text(path.read_text().replace("bash\n", "bash\necho a | cat > /dev/null\n", 1))
    found = only(project)
    assert (found.rule, found.severity, found.line) == ("pipe-before-pipefail", "warning", 2)


def test_narrow_margins_of_recorded_runs(project: Project) -> None:
    project.case(BASE)
    run = project.root / "results" / "smoke" / "t-1" / BASE / "1"
    run.mkdir(parents=True)
    check = {"check": 'data["train/loss"]["30"] < 5', "status": "PASS", "margin_percent": 5.5}
    (run / "checks.json").write_text(json.dumps({"checks": [check]}))
    assert findings(project) == []
    by_hand = project.root / "results" / "manual" / f"20260101-000000-{BASE}"
    by_hand.mkdir(parents=True)
    (by_hand / "checks.json").write_text(json.dumps({"checks": [check | {"margin_percent": 4.9}]}))
    found = only(project)
    assert (found.rule, found.line) == ("no-margin", 5)
    assert "4.9 %" in found.message
    # Evidence that cannot be read says nothing.
    (by_hand / "checks.json").write_text("{")
    assert findings(project) == []


def test_arms_that_differ_are_named_key_by_key(clean: Project) -> None:
    clean.case(
        f"{BASE}-lora", "policy:\n  train_micro_batch_size: 2\n  dtensor_cfg: {lora_cfg: {enabled: true}}\n"
    )
    found = only(clean)
    assert (found.rule, found.severity) == ("incomparable-arms", "error")
    assert "policy.train_micro_batch_size: 4 and 2" in found.message
    # It stops no run: the pair's verdict says it.
    assert blocking([found]) == []
    clean.suite(PAIR + "  allow: [policy.train_micro_batch_size]\n")
    assert findings(clean) == []


def test_arms_that_are_shown_because_they_are_no_pair(clean: Project) -> None:
    """Lint is silent as long as the suite's word holds; the plan calls the arms what they are."""
    lora = "policy:\n  train_micro_batch_size: 2\n  dtensor_cfg: {lora_cfg: {enabled: true}}\n"
    clean.case(f"{BASE}-lora", lora)
    suite = clean.suite(PAIR + "  comparable: false\n")
    assert findings(clean) == []
    (pair,) = load_plan(suite).pairs
    assert [each.key for each in pair.not_comparable] == ["policy.train_micro_batch_size"]
    clean.case(f"{BASE}-lora", lora.replace("size: 2", "size: 4"))
    found = only(clean)
    assert (found.rule, found.severity) == ("incomparable-arms", "error")
    assert "comparable is false, but its arms differ in nothing" in found.message


@pytest.mark.parametrize("limit", ["1.05", "1.1", "1.5", "3"])
def test_a_tail_is_a_limit_that_can_fail(clean: Project, limit: str) -> None:
    """A pair may state a tail's limit itself, wider than the one that it gets without a word."""
    times = [f'{arm}["timing/train/step_time"]' for arm in ("lora", "full")]
    clean.suite(PAIR + f"  checks: ['tail_ratio({', '.join(times)}) < {limit}']\n")
    assert findings(clean) == []


@pytest.mark.parametrize(
    ("check", "rules"),
    [
        ('max_rel_diff(lora["train/loss"], full["train/loss"]) < 0.1', ["equal-steps"]),
        ('abs(ratio(lora["train/loss"], full["train/loss"]) - 1) < 0.1', ["equal-steps"]),
        ('ratio(lora["train/loss"], full["train/loss"]) < 1.1', []),
        ('tail_ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 1.1', []),
        ('mean(lora["train/loss"]) - mean(full["train/loss"]) < 0.1', []),
    ],
)
def test_arms_of_different_batches_are_not_compared_step_by_step(
    clean: Project, check: str, rules: list[str]
) -> None:
    for batches, expected in (("different", rules), ("equal", [])):
        clean.suite(PAIR + f"  batches: {batches}\n  checks: ['{check}']\n")
        assert [found.rule for found in findings(clean)] == expected


@pytest.mark.parametrize(
    ("check", "rule"),
    [
        ('ratio(lora["train/loss"], ful["train/loss"]) < 1', "unknown-arm"),
        ('ratio(lora["train/loss"], full["train/loss"] < 1', "unparsable-check"),
        ('ratio(lora["train/loss"], full["train/loss"]) > 0', "cannot-fail"),
        ('max(lora["train/loss"]) - data["train/loss"]["1"] < 1', "unknown-arm"),
    ],
)
def test_pair_check(clean: Project, check: str, rule: str) -> None:
    clean.suite(PAIR + f"  checks: ['{check}']\n")
    assert only(clean).rule == rule


def test_check_that_a_suite_adds(clean: Project) -> None:
    clean.suite(PAIR + f'cases: [{{case: {BASE}, checks: [\'data["train/loss"]["31"] < 5\']}}]\n')
    found = only(clean)
    assert (found.rule, found.file.name) == ("unreachable-step", "test.yaml")


def test_budget_is_exact(clean: Project) -> None:
    # Two runs of two processes for 3 minutes: 12 minutes, 0.2 hours.
    clean.suite(PAIR + "budget_gpu_hours: 0.2\n")
    assert findings(clean) == []
    clean.suite(PAIR + "budget_gpu_hours: 0.1999\n")
    found = only(clean)
    assert (found.rule, found.severity) == ("budget", "error")
    assert "0.2 GPU-hours" in found.message


@pytest.mark.parametrize("text", ["name: x\n", PAIR.replace(f"{BASE}-lora", "nothing"), PAIR + "repeat: 4\n"])
def test_suite_that_does_not_resolve(clean: Project, text: str) -> None:
    clean.suite(text)
    assert only(clean).rule == "suite"


def test_plan_is_linted_with_its_cases_and_without_its_overrides(clean: Project) -> None:
    clean.case(BASE, driver=driver("check 'count(data[\"train/loss\"]) > 0'"))
    plan = clean.plan(PAIR, overrides=("sft.max_num_steps=3", "cluster.gpus_per_node=1"))
    (found,) = lint_plan(plan, TODAY)
    assert found.rule == "cannot-fail"
    assert blocking([found]) == [found]


def test_one_file_is_linted_alone(clean: Project) -> None:
    clean.case(BASE, driver=SIMPLE.replace('"$@"', "$@"))
    assert lint([clean.root / "recipes" / f"{BASE}.yaml"], TODAY) == []
    (found,) = lint([clean.root / "scripts"], TODAY)
    assert str(found) == f"{found.file}:4: warning: {found.message} [unquoted-arguments]"


def test_paths_default_to_the_current_folder(clean: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    clean.case(BASE, driver=SIMPLE.replace('"$@"', "$@"))
    monkeypatch.chdir(clean.root)
    assert [str(found.file) for found in lint(today=TODAY)] == [f"scripts/{BASE}.sh"]


@pytest.mark.parametrize("name", ["gone.yaml", "notes.txt", "empty", "no.yaml", "bytes.sh"])
def test_unreadable_input_is_an_error_of_the_call(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.yaml").write_text("a: [")
    (tmp_path / "bytes.sh").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=name):
        lint([tmp_path / name], TODAY)
