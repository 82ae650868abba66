# SPDX-License-Identifier: Apache-2.0
"""External cases in a suite: what is read, what is refused, and how arms of different trainers compare."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan import load_plan
from lora_suite.plan.lint import lint_plan
from lora_suite.plan.model import ExternalCase, Plan, UnreadableCase
from tests.plan.conftest import Project
from tests.plan.external.conftest import WHOLE, Repository

FULL, LORA = "sft-a-2n8g-fsdp2", "sft-a-2n8g-fsdp2-lora"
RECIPE = """
sft: {max_num_steps: 100}
policy:
  model_name: meta-llama/Llama-3.1-8B
  tokenizer: {name: "${policy.model_name}", chat_template: x}
  train_global_batch_size: 16
  max_total_sequence_length: 2048
  precision: bfloat16
  dtensor_cfg: {enabled: true, lora_cfg: {enabled: false, dim: 8}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1e-5}}
logger: {log_dir: logs}
cluster: {num_nodes: 2, gpus_per_node: 8}
"""
WITH_LORA = f"defaults: {FULL}.yaml\npolicy: {{dtensor_cfg: {{lora_cfg: {{enabled: true}}}}}}\n"
NATIVE = "sft-b-1n2c-fsdp2-lora"
PLAIN = """
    command: [python, train.py]
    cwd: ../their
    outputs: [out]
    metrics: out/metrics.json
    steps: 30
    minutes: 2
    gpus: 2
"""
SAME = "declares: {model: tiny-llama, tokens_per_step: 1024, dtype: fp32, optimizer: AdamW, lora: true}"


@pytest.fixture
def repository(project: Project) -> Repository:
    """Their repository, beside ours."""
    return Repository(project.root / "their")


@pytest.fixture
def theirs(project: Project, repository: Repository) -> Project:
    """A pair of scripts with recipes, and a native case."""
    for name, recipe in ((FULL, RECIPE), (LORA, WITH_LORA)):
        repository.script(name)
        repository.recipe(name, recipe)
    project.case(NATIVE, "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n")
    return project


def entry(name: str, more: str = "") -> str:
    return (
        f"- case: {name}\n  external:\n    command: bash tests/test_suites/llm/{name}.sh\n"
        f"    cwd: ../their\n    dialect: nemo-rl\n{more}"
    )


def suite(*cases: str, pairs: str = "") -> str:
    return f"name: x\ncases:\n{''.join(cases)}{pairs}"


def plain(more: str = "", name: str = "theirs") -> str:
    return f"- case: {name}\n  external:{PLAIN}" + (f"    {more}\n" if more else "")


def external(plan: Plan, name: str) -> ExternalCase:
    case = plan.cases[name]
    assert isinstance(case, ExternalCase)
    return case


def refused(plan: Plan) -> dict[str, tuple[object, object]]:
    (pair,) = plan.pairs
    return {found.key: (found.left, found.right) for found in pair.not_comparable}


def test_script_says_all_that_a_case_needs(theirs: Project, repository: Repository) -> None:
    case = external(theirs.plan(suite(entry(LORA))), LORA)
    # 3 submissions of 30 minutes; the launcher's default of 8 GPUs a node.
    assert (case.steps, case.minutes, case.gpus, case.lora) == (50, 90.0, 16, True)
    assert case.command == ("bash", f"tests/test_suites/llm/{LORA}.sh")
    assert case.outputs == (Path(f"tests/test_suites/llm/{LORA}"),)
    assert case.metrics == Path(f"tests/test_suites/llm/{LORA}/metrics.json")
    assert [(check.line, check.file) for check in case.checks] == [(n, case.source) for n in (27, 28, 29)]
    assert case.facts == {
        "trainer": "nemo-rl",
        "model": "llama-3.1-8b",
        "tokens_per_step": 16 * 2048,
        "ranks": 16,
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "lora": True,
        "lora_rank": 8,
    }
    assert case.recipe_tree is not None
    # The script's own override.
    assert case.recipe_tree["sft"]["max_num_steps"] == 50
    assert not (repository.root / f"tests/test_suites/llm/{LORA}").exists()


def test_checks_that_only_the_script_can_make_are_left_to_it(theirs: Project, repository: Repository) -> None:
    check = 'uv run tests/check_metrics.py {} \'data["score"]["1"] > {}\'\n'
    more = (
        check.format("${RUN_LOG}-eval.json", 1)
        + f"if [[ $GPU == H100 ]]; then\n{check.format('$JSON_METRICS', 2)}fi\n"
        + check.format("$JSON_METRICS", 3)
    )
    script = repository.script(LORA, WHOLE + more)
    case = external(theirs.plan(suite(entry(LORA))), LORA)
    assert [check.line for check in case.checks] == [27, 28, 29, 36]
    log = f"{script.parent}/{LORA}/run.log-eval.json"
    assert case.left == (
        f'data["score"]["1"] > 1 ({LORA}.sh:32 reads {log})',
        f'data["score"]["1"] > 2 ({LORA}.sh:34 stands in a block that begins in line 33)',
    )


def test_cost_counts_all_nodes(theirs: Project) -> None:
    assert theirs.plan(suite(entry(LORA))).gpu_hours == 16 * 1.5


def test_their_pair_is_compared_by_its_recipes(theirs: Project, repository: Repository) -> None:
    pair = f"pairs:\n- {{name: p, arms: {{full: {FULL}, lora: {LORA}}}}}\n"
    assert refused(theirs.plan(suite(entry(FULL), entry(LORA), pairs=pair))) == {}
    repository.script(FULL, WHOLE.replace("NUM_NODES=2", "NUM_NODES=1"))
    repository.recipe(FULL, RECIPE.replace("precision: bfloat16", "precision: bfloat16\n  ep: 8"))
    repository.recipe(LORA, WITH_LORA + "data: {name: tulu3}\n")
    found = refused(theirs.plan(suite(entry(FULL), entry(LORA), pairs=pair)))
    assert found == {"ranks": (8, 16), "data.name": ("(absent)", "tulu3")}


def test_arm_override_reaches_the_command_and_the_recipe(theirs: Project) -> None:
    pair = f"pairs:\n- {{name: p, arms: {{full: {FULL}, lora: {LORA}}}}}\n"
    text = suite(entry(FULL), entry(LORA), pairs=pair)
    plan = theirs.plan(text, arm_overrides=("lora:policy.train_global_batch_size=8",))
    assert plan.cases[LORA].overrides == ("policy.train_global_batch_size=8",)
    assert refused(plan) == {"policy.train_global_batch_size": (16, 8)}


def test_overrides_of_the_command_line_are_for_our_cases_alone(theirs: Project) -> None:
    plan = theirs.plan(suite(entry(LORA), f"- {NATIVE}\n"), overrides=("sft.seed=3",))
    assert plan.cases[LORA].overrides == ()
    assert plan.cases[NATIVE].overrides == ("sft.seed=3",)


def test_arguments_need_a_script_that_hands_them_on(theirs: Project, repository: Repository) -> None:
    repository.script(LORA, WHOLE.replace("    $@ \\\n", ""))
    with pytest.raises(ConfigError, match=rf"{LORA}\.sh:16: the script does not hand on its arguments"):
        theirs.plan(suite(entry(LORA).replace("  external", "  overrides: [a=1]\n  external")))


@pytest.mark.parametrize(
    ("script", "recipe", "where"),
    [
        (WHOLE.replace("fi\n", ""), WITH_LORA, rf"{LORA}\.sh:25: not readable as bash"),
        (WHOLE.replace("MAX_STEPS=50", "MAX_STEPS=x"), WITH_LORA, rf"{LORA}\.sh:8: MAX_STEPS=x is no number"),
        (WHOLE, "a: [1\n", rf"{LORA}\.yaml:2: not valid YAML"),
        (WHOLE.replace("sft.max", "sft.maxx"), WITH_LORA, rf"{LORA}\.sh:16: override 'sft\.maxx"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_others_are_planned(
    theirs: Project, repository: Repository, script: str, recipe: str, where: str
) -> None:
    repository.script(LORA, script)
    repository.recipe(LORA, recipe)
    pair = f"pairs:\n- {{name: p, arms: {{full: {FULL}, lora: {LORA}}}}}\n"
    plan = theirs.plan(suite(entry(FULL), entry(LORA), f"- {NATIVE}\n", pairs=pair))
    broken = plan.cases[LORA]
    assert isinstance(broken, UnreadableCase)
    assert re.search(where, broken.problem)
    assert {run.case for run in plan.runs} == {FULL, LORA, NATIVE}
    (finding,) = lint_plan(plan)
    assert (finding.severity, finding.rule) == ("warning", "unreadable")
    assert re.search(where, f"{finding.file}:{finding.line}: {finding.message}")


def test_a_case_that_the_suite_describes(theirs: Project) -> None:
    plan = theirs.plan(suite(plain(f"nodes: 2\n    {SAME}").replace("python,", "'{python}',")))
    case = external(plan, "theirs")
    assert (case.steps, case.minutes, case.gpus, case.lora) == (30, 2.0, 4, True)
    assert case.command == (sys.executable, "train.py")
    assert case.facts["dtype"] == "float32"
    assert case.facts["trainer"] == "external"
    assert case.dialect.name == "common"


def test_a_native_and_an_external_arm_compare_by_what_both_say(theirs: Project) -> None:
    def plan(declares: str, allow: str = "") -> Plan:
        pair = (
            f"pairs:\n- {{name: p, arms: {{ours: {NATIVE}, theirs: theirs}}, checks: ['1 < 2'], "
            f"allow: [{allow}]}}\n"
        )
        return theirs.plan(suite(plain(declares), pairs=pair))

    # The tiny Llama: 16 rows of 64 slots, two processes, float32.
    assert refused(plan(SAME)) == {"trainer": ("lora-suite", "external")}
    assert refused(plan(SAME, "trainer")) == {}
    other = SAME.replace("1024", "2048").replace("fp32", "bfloat16")
    assert refused(plan(other, "trainer")) == {
        "tokens_per_step": (1024, 2048),
        "dtype": ("float32", "bfloat16"),
    }
    few = plan(
        "declares: {model: models/Tiny-Llama.json, global_batch_size: 16, sequence_length: 64}", "trainer"
    )
    assert refused(few) == {}
    assert few.pairs[0].not_compared == ("dtype", "optimizer", "lora")
    # Without its model and the size of a step an arm can be compared with nothing.
    assert set(refused(plan("", "trainer"))) == {"model", "tokens_per_step"}
    assert refused(plan(SAME.replace("lora: true", "lora: true, lora_rank: 16"), "trainer")) == {
        "lora_rank": (8, 16)
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("outputs: [out]", "outputs: [../out]", "output .* is not inside cwd"),
        ("outputs: [out]", "outputs: [.]", "output .* is not inside cwd"),
        ("outputs: [out]", "outputs: [/tmp/out]", "output /tmp/out is not inside cwd"),
        ("outputs: [out]", "outputs: [link/out]", "leads out of cwd .* by a symlink, to "),
        ("outputs: [out]", "outputs: []", "outputs are missing"),
        ("out/metrics.json", "elsewhere/metrics.json", r"is in none of the outputs \(out\)"),
        ("cwd: ../their", "cwd: ../nowhere", "there is no folder"),
        ("steps: 30", "", "steps is missing"),
        ("minutes: 2", "", "minutes is missing"),
        ("gpus: 2", "", "gpus is missing"),
        ("metrics: out/metrics.json", "", "metrics is missing"),
        ("steps: 30", "step: 30", r"unknown key cases\.0\.external\.step; did you mean steps\?"),
        ("gpus: 2", "gpus: 2\n    declares: {modle: x}", r"declares\.modle; did you mean model\?"),
        ("gpus: 2", "gpus: 2\n    dialect: nemorl", "no dialect 'nemorl'; did you mean nemo-rl"),
        ("gpus: 2", "gpus: 2\n    dialect: nemo-rl", "no word of the command is a script"),
        ("gpus: 2", "gpus: 2\n    dialect: mine.yaml", "there is no file"),
        ("command: [python, train.py]", "command: []", "write the program"),
        ("case: theirs", "case: ../x", "becomes a folder"),
        ("gpus: 2", "gpus: 2\n    declares: {global_batch_size: 2}", "belong together"),
        (
            "gpus: 2",
            "gpus: 2\n    declares: {tokens_per_step: 9, global_batch_size: 2, sequence_length: 2}",
            "one or the other",
        ),
    ],
)
def test_what_is_wrong_in_the_suite_is_named(theirs: Project, old: str, new: str, message: str) -> None:
    (theirs.root / "elsewhere").mkdir()
    (theirs.root / "their" / "link").symlink_to(theirs.root / "elsewhere")
    text = suite(plain())
    assert old in text
    with pytest.raises(ConfigError, match=message) as caught:
        theirs.plan(text.replace(old, new))
    assert "test.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("    steps: 40\n", "steps is 40, but the script says 50"),
        ("    declares: {model: qwen}\n", "declares.model is 'qwen', but the recipe says 'llama-3.1-8b'"),
    ],
)
def test_the_suite_may_not_contradict_their_files(theirs: Project, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        theirs.plan(suite(entry(LORA, more)))


def test_checks_of_the_suite_are_linted_with_any_metric(theirs: Project) -> None:
    checks = """  checks: ['data["their/own"]["30"] < 1', 'data["train/loss"]["31"] < 1']\n"""
    findings = lint_plan(theirs.plan(suite(plain()) + checks))
    assert [finding.rule for finding in findings] == ["unreachable-step"]


def test_a_fault_planted_in_the_native_arm_is_named(theirs: Project) -> None:
    pair = f"pairs:\n- {{name: p, arms: {{ours: {NATIVE}, theirs: theirs}}, checks: ['1 < 2']}}\n"
    text = suite(plain(SAME), pairs=pair)
    assert theirs.plan(text).pairs[0].faults == ()
    (fault,) = theirs.plan(text, arm_overrides=("ours:debug.faults.slow_step=3.0",)).pairs[0].faults
    assert (fault.key, fault.left, fault.right) == ("debug.faults.slow_step", 3.0, 1.0)


def test_an_arm_may_be_external_in_a_suite_of_ours(theirs: Project) -> None:
    pair = f"pairs:\n- {{name: p, arms: {{ours: {NATIVE}, theirs: theirs}}, checks: ['1 < 2']}}\n"
    plan = load_plan(theirs.suite(suite(plain(SAME), pairs=pair)), repeats=2)
    assert [run.case for run in plan.runs] == [NATIVE, "theirs", "theirs", NATIVE]
