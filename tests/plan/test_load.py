# SPDX-License-Identifier: Apache-2.0
"""From suite to plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.plan import load_plan
from lora_suite.plan.model import PlannedRun
from tests.plan.conftest import SIMPLE, Project

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = "nano_v3_published_pair"
LORA = "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n"
FULL_STEM, LORA_STEM, OTHER = "sft-a-1n2c-fsdp2", "sft-a-1n2c-fsdp2-lora", "sft-b-1n2c-fsdp2-lora"
PAIR = f"name: x\nrepeats: 2\npairs:\n- {{name: p, arms: {{full: {FULL_STEM}, lora: {LORA_STEM}}}}}\n"
SECOND = f"- {{name: q, arms: {{full: {FULL_STEM}, lora: {OTHER}}}}}\n"
REUSE = f"- {{name: r, arms: {{a: {LORA_STEM}, b: {FULL_STEM}}}, reuse: true, checks: ['1 < 2']}}\n"
THREE = "".join(
    [
        PAIR.replace("name: p,", "name: first,"),
        SECOND.replace("name: q,", "name: second,"),
        REUSE.replace("name: r,", "name: again,"),
    ]
)


@pytest.fixture
def cases(project: Project) -> Project:
    project.case(FULL_STEM)
    project.case(LORA_STEM, LORA)
    project.case(OTHER, LORA)
    return project


def test_smoke_suite_is_16_runs_of_4_cases_in_abba_order() -> None:
    plan = load_plan(ROOT / "suites" / "smoke.yaml")
    assert Counter(run.case for run in plan.runs) == dict.fromkeys(plan.cases, 4)
    assert len(plan.cases) == 4
    first = [run for run in plan.runs if run.pair == "fsdp2"]
    assert "".join("f" if run.arm == "full" else "l" for run in first) == "fllflffl"
    assert [run.repeat for run in first] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [pair.name for pair in plan.pairs] == ["fsdp2", "megatron", "backends"]
    assert plan.pairs[2].reuse
    assert not any(pair.not_comparable for pair in plan.pairs)
    # 16 runs of 2 processes for 3 minutes.
    assert plan.gpu_hours == 1.6


@pytest.mark.parametrize("suite", sorted((ROOT / "suites").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("overrides", [(), ("policy.init=random",)])
def test_every_suite_resolves_within_its_budget(suite: Path, overrides: tuple[str, ...]) -> None:
    plan = load_plan(suite, overrides=overrides)
    assert plan.budget_gpu_hours is not None
    assert plan.gpu_hours <= plan.budget_gpu_hours
    comparable = not any(pair.not_comparable for pair in plan.pairs)
    assert comparable is (suite.stem != PUBLISHED)


def test_the_published_pair_differs_in_more_than_lora() -> None:
    (pair,) = load_plan(ROOT / "suites" / f"{PUBLISHED}.yaml").pairs
    found = {difference.key: (difference.left, difference.right) for difference in pair.not_comparable}
    assert found["ranks"] == (8, 16)
    assert found["cluster.num_nodes"] == (1, 2)
    assert found["policy.dtensor_cfg.expert_parallel_size"] == (8, 1)
    assert found["policy.dtensor_cfg.automodel_kwargs.force_hf"] == (False, True)
    kernels = "policy.dtensor_cfg.automodel_kwargs.backend"
    assert {key for key in found if key.startswith(kernels)} == {
        f"{kernels}.{name}" for name in ("attn", "dispatcher", "experts", "linear")
    }
    assert not any("lora_cfg" in key for key in found)


@pytest.mark.parametrize(
    ("suite", "arm", "key"),
    [
        ("nano_v3_8l_1n1g", "policy.dtensor_cfg.experts_implementation=loop", "experts_implementation"),
        ("nano_v3_2n8g", "policy.dtensor_cfg.expert_parallel_size=1", "expert_parallel_size"),
    ],
)
def test_what_an_arm_lost_of_the_experts_is_named(suite: str, arm: str, key: str) -> None:
    """The classic cause of a slow LoRA: without the full arm's kernels or its expert parallelism."""
    plan = load_plan(ROOT / "suites" / f"{suite}.yaml", arm_overrides=[f"lora:{arm}"])
    for pair in plan.pairs:
        assert [difference.key for difference in pair.not_comparable] == [f"policy.dtensor_cfg.{key}"]


def test_every_recipe_that_is_no_parent_alone_is_in_a_suite_or_has_a_driver() -> None:
    stems = {path.stem for path in (ROOT / "recipes").glob("*.yaml")} - {"sft"}
    assert stems == {path.stem for path in (ROOT / "scripts").glob("*.sh")} - {"common"}


def test_cost_is_exact(cases: Project) -> None:
    """0.1 minutes, 60 times, of 2 processes: exactly 0.2 hours, which a sum of floats misses."""
    for stem in (FULL_STEM, LORA_STEM):
        cases.case(stem, LORA if stem == LORA_STEM else "", SIMPLE.replace("minutes=3", "minutes=0.1"))
    assert cases.plan(PAIR, repeats=30).gpu_hours == 0.2


def test_repeats_of_the_command_line_win(cases: Project) -> None:
    assert len(cases.plan(PAIR).runs) == 4
    assert len(cases.plan(PAIR, repeats=5).runs) == 10
    text = PAIR.replace("arms:", "repeats: 3, arms:")
    assert len(cases.plan(text).runs) == 6
    assert len(cases.plan(text, repeats=1).runs) == 2


def test_case_that_two_pairs_run_counts_on(cases: Project) -> None:
    plan = cases.plan(PAIR + SECOND)
    assert [(run.case, run.repeat, run.pair) for run in plan.runs if run.case == FULL_STEM] == [
        (FULL_STEM, 1, "p"),
        (FULL_STEM, 2, "p"),
        (FULL_STEM, 3, "q"),
        (FULL_STEM, 4, "q"),
    ]


def test_cases_outside_pairs_run_as_often_as_the_suite_says(cases: Project) -> None:
    plan = cases.plan(f"name: x\nrepeats: 2\ncases: [{FULL_STEM}, {OTHER}]\n")
    assert plan.runs == tuple(
        PlannedRun(case=stem, repeat=repeat, pair=None, arm=None)
        for repeat in (1, 2)
        for stem in (FULL_STEM, OTHER)
    )


def test_listing_a_case_of_a_pair_adds_checks_and_overrides_but_no_runs(cases: Project) -> None:
    entry = f"cases: [{{case: {FULL_STEM}, checks: ['1 < 2'], overrides: ['sft.seed=7']}}]\n"
    plan = cases.plan(PAIR + entry)
    assert len(plan.runs) == 4
    case = plan.cases[FULL_STEM]
    assert [check.expression for check in case.checks] == ['data["train/loss"]["30"] < 5', "1 < 2"]
    assert case.checks[1].file == plan.path
    assert (case.recipe.sft.seed, case.overrides) == (7, ("sft.seed=7",))
    assert [difference.key for difference in plan.pairs[0].not_comparable] == ["sft.seed"]


def test_overrides_come_in_order_suite_command_line_arm(cases: Project) -> None:
    entry = f"cases: [{{case: {LORA_STEM}, overrides: ['sft.seed=1']}}]\n"
    plan = cases.plan(PAIR + entry, overrides=("sft.seed=2",), arm_overrides=("lora:sft.seed=3",))
    assert plan.cases[LORA_STEM].overrides == ("sft.seed=1", "sft.seed=2", "sft.seed=3")
    assert plan.cases[LORA_STEM].recipe.sft.seed == 3
    assert plan.cases[FULL_STEM].recipe.sft.seed == 2


def test_overrides_of_the_suite_come_first_and_are_for_our_cases_alone(cases: Project) -> None:
    external = "{command: [c], cwd: ., outputs: [o], metrics: o, steps: 1, minutes: 1, gpus: 1}"
    theirs = f"{{case: theirs, external: {external}}}"
    entry = f"overrides: [sft.seed=4]\ncases: [{theirs}, {{case: {LORA_STEM}, overrides: ['sft.seed=5']}}]\n"
    plan = cases.plan(PAIR + entry, overrides=("sft.seed=6",))
    assert plan.cases[FULL_STEM].overrides == ("sft.seed=4", "sft.seed=6")
    assert plan.cases[LORA_STEM].overrides == ("sft.seed=4", "sft.seed=5", "sft.seed=6")
    assert plan.cases["theirs"].overrides == ()


WIDE = f"{LORA_STEM}-r64"
THREE_ARMS = (
    "name: x\nrepeats: 2\n"
    f"cases: [{{case: {WIDE}, recipe: {LORA_STEM}, overrides: [policy.dtensor_cfg.lora_cfg.dim=64]}}]\n"
    f"pairs: [{{name: p, arms: {{full: {FULL_STEM}, lora: {LORA_STEM}, wide: {WIDE}}}, checks: ['1 < 2']}}]\n"
)


def test_a_case_may_be_another_recipe_under_a_name_of_its_own(cases: Project) -> None:
    plan = cases.plan(THREE_ARMS)
    wide, narrow = plan.cases[WIDE], plan.cases[LORA_STEM]
    assert (wide.recipe_path, wide.driver_path) == (narrow.recipe_path, narrow.driver_path)
    assert wide.stem == WIDE
    assert [case.recipe.policy.lora.dim for case in (narrow, wide)] == [8, 64]
    # Each arm is a case of its own, run once a repeat, forwards and then backwards.
    assert [(run.case, run.repeat) for run in plan.runs] == [
        (FULL_STEM, 1),
        (LORA_STEM, 1),
        (WIDE, 1),
        (WIDE, 2),
        (LORA_STEM, 2),
        (FULL_STEM, 2),
    ]
    assert not plan.pairs[0].not_comparable


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sft-a-1n2c-fsdp2-wide", "the name does not fit the recipe: it lacks -lora"),
        ("sft-a-1n4c-fsdp2-lora-wide", "it says 4 processes a node, but cluster.gpus_per_node is 2"),
        ("sft-a-1n2c-fsdp2tp2-lora", "it says tp 2, but policy.dtensor_cfg.tensor_parallel_size is 1"),
        (OTHER, "has a recipe of its own"),
    ],
)
def test_that_name_says_what_the_case_is(cases: Project, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"case {name}: .*{message}"):
        cases.plan(THREE_ARMS.replace(WIDE, name))


def test_a_recipe_that_is_not_there_is_told_under_the_name_of_the_case(cases: Project) -> None:
    with pytest.raises(
        ConfigError, match=rf"case {WIDE}: there is no .*{OTHER}s\.yaml; did you mean {OTHER}\?"
    ):
        cases.plan(THREE_ARMS.replace(f"recipe: {LORA_STEM}", f"recipe: {OTHER}s"))


def test_what_the_command_line_makes_of_it_is_no_part_of_its_name(cases: Project) -> None:
    plan = cases.plan(THREE_ARMS, overrides=("cluster.gpus_per_node=1",))
    assert plan.cases[WIDE].gpus == 1


def test_what_the_suite_makes_of_every_case_is_part_of_its_name(cases: Project) -> None:
    name = "sft-a-1n1c-fsdp2-lora-r64"
    text = THREE_ARMS.replace(WIDE, name)
    with pytest.raises(ConfigError, match=r"it says 1 processes a node, but cluster\.gpus_per_node is 2"):
        cases.plan(text)
    assert cases.plan(text + "overrides: [cluster.gpus_per_node=1]\n").cases[name].gpus == 1


def test_limits_of_a_case_are_keyed_by_gpu_and_are_alternatives(cases: Project) -> None:
    limits = "{H200: ['1 < 3', '1 < 4'], H100: ['1 < 5']}"
    plan = cases.plan(PAIR + f"cases: [{{case: {LORA_STEM}, checks: ['1 < 2'], limits: {limits}}}]\n")
    _, extra, *limited = plan.cases[LORA_STEM].checks
    assert (extra.expression, extra.on) == ("1 < 2", None)
    assert [(check.expression, check.on, check.file) for check in limited] == [
        ("1 < 3", "H200", plan.path),
        ("1 < 4", "H200", plan.path),
        ("1 < 5", "H100", plan.path),
    ]
    assert {check.call for check in limited} != {extra.call}
    assert len({check.call for check in limited}) == 1


def test_arms_may_be_meant_to_see_different_batches(cases: Project) -> None:
    plan = cases.plan(PAIR.replace("name: p,", "name: p, batches: different,") + SECOND)
    assert [pair.different_batches for pair in plan.pairs] == [True, False]


def test_overrides_of_the_driver_count(cases: Project) -> None:
    cases.case(FULL_STEM, driver=SIMPLE.replace('"$@"', 'sft.seed=9 "$@"'))
    plan = cases.plan(PAIR)
    assert plan.cases[FULL_STEM].recipe.sft.seed == 9
    assert plan.cases[FULL_STEM].overrides == ()


def test_arm_override_reaches_every_pair_and_shows_as_a_fault(cases: Project) -> None:
    plan = cases.plan(PAIR + SECOND, arm_overrides=("lora:debug.faults.freeze_b=true",))
    assert [plan.cases[stem].recipe.debug.faults.freeze_b for stem in (FULL_STEM, LORA_STEM, OTHER)] == [
        False,
        True,
        True,
    ]
    assert [[fault.key for fault in pair.faults] for pair in plan.pairs] == [["debug.faults.freeze_b"]] * 2
    assert not any(pair.not_comparable for pair in plan.pairs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Lora:sft.seed=1", "no pair has an arm 'Lora'; there are: full, lora"),
        ("sft.seed=1", "write NAME:KEY=VALUE"),
        ("lora:", "write NAME:KEY=VALUE"),
    ],
)
def test_wrong_arm_override_is_named(cases: Project, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.plan(PAIR, arm_overrides=(text,))


def test_reusing_pair_adds_no_runs(cases: Project) -> None:
    plan = cases.plan(PAIR + REUSE)
    assert {run.pair for run in plan.runs} == {"p"}
    assert [pair.reuse for pair in plan.pairs] == [False, True]


def test_reusing_pair_that_nobody_makes_runs_for_is_refused(cases: Project) -> None:
    with pytest.raises(ConfigError, match=f"pair r reuses runs, but nothing else runs {LORA_STEM}"):
        cases.plan(f"name: x\ncases: [{FULL_STEM}]\npairs:\n{REUSE}")


@pytest.mark.parametrize(
    ("select", "pairs", "runs"),
    [
        ("first", ["first"], {"first"}),
        # The pair that reuses runs comes along where what is taken makes all its runs.
        ("lora and not -b-", ["first", "again"], {"first"}),
        ("-b-", ["second"], {"second"}),
        ("first or second or again", ["first", "second", "again"], {"first", "second"}),
        # Taken by name alone it makes its runs itself.
        ("again", ["again"], {"again"}),
    ],
)
def test_selection(cases: Project, select: str, pairs: list[str], runs: set[str]) -> None:
    plan = cases.plan(THREE, select=select)
    assert [pair.name for pair in plan.pairs] == pairs
    assert {run.pair for run in plan.runs} == runs


def test_selection_of_nothing_names_what_there_is(cases: Project) -> None:
    with pytest.raises(ConfigError, match="-k 'zzz' matches nothing; there are first, second, again"):
        cases.plan(THREE, select="zzz")


def test_reusing_pair_taken_alone_makes_its_runs(cases: Project) -> None:
    plan = cases.plan(
        PAIR.replace("name: p,", "name: pp,") + REUSE.replace("name: r,", "name: rr,"), select="rr"
    )
    assert [(pair.name, pair.reuse) for pair in plan.pairs] == [("rr", False)]
    assert Counter(run.arm for run in plan.runs) == {"a": 2, "b": 2}


def test_selected_cases_alone(cases: Project) -> None:
    plan = cases.plan(f"name: x\ncases: [{FULL_STEM}, {OTHER}]\n", select="-b-")
    assert [run.case for run in plan.runs] == [OTHER]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ncases: [sft-a-1n2c-fsdp2-lroa]\n", "did you mean sft-a-1n2c-fsdp2-lora"),
        ("name: x\ncases: [zzz]\n", r"case zzz: there is no .*recipes/zzz\.yaml$"),
    ],
)
def test_missing_case_names_the_nearest(cases: Project, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.plan(text)


def test_missing_driver_is_named(cases: Project) -> None:
    (cases.root / "scripts" / f"{FULL_STEM}.sh").unlink()
    with pytest.raises(ConfigError, match=rf"there is no .*scripts/{FULL_STEM}\.sh"):
        cases.plan(PAIR)


def test_driver_that_never_trains_is_refused(cases: Project) -> None:
    cases.case(FULL_STEM, driver="declare_case steps=3 minutes=1\n")
    with pytest.raises(ConfigError, match="never calls train"):
        cases.plan(PAIR)


@pytest.mark.parametrize(
    ("override", "message"),
    [("policy.dtensor_cfg.lora_cfg.dimm=8", "dimm"), ("policy.train_global_batch_size=15", "15")],
)
def test_what_is_wrong_with_a_recipe_is_found_by_planning(
    cases: Project, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.plan(PAIR, overrides=(override,))


def test_missing_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_plan(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("suite", "pair", "stems", "runs"),
    [
        # Two repeats on GPUs are measured ones; a CPU, or a single run, is warm enough.
        ("", "", "g", 1),
        ("", "", "c", 0),
        ("repeats: 1\n", "", "g", 0),
        ("warmup_runs: 0\n", "", "g", 0),
        ("warmup_runs: 1\n", "", "c", 1),
        ("warmup_runs: 1\n", ", warmup_runs: 0", "c", 0),
        ("", ", warmup_runs: 1", "c", 1),
    ],
)
def test_pairs_on_gpus_begin_with_a_run_that_is_discarded(
    project: Project, suite: str, pair: str, stems: str, runs: int
) -> None:
    full, lora = f"sft-a-1n2{stems}-fsdp2", f"sft-a-1n2{stems}-fsdp2-lora"
    project.case(full)
    project.case(lora, LORA)
    head = suite if "repeats" in suite else f"repeats: 2\n{suite}"
    plan = project.plan(f"name: x\n{head}pairs:\n- {{name: p, arms: {{full: {full}, lora: {lora}}}{pair}}}\n")
    discarded = [run for run in plan.runs if run.discarded]
    assert discarded == [PlannedRun(full, 0, "p", "full")][:runs]
    assert plan.runs[:runs] == tuple(discarded)


def test_a_budget_plans_looks_whatever_the_repeats_are(cases: Project) -> None:
    plan = cases.plan(THREE, budget_minutes=20.0)
    assert [pair.looks for pair in plan.pairs] == [(2, 4, 6, 8)] * 3
    assert [pair.repeats for pair in plan.pairs] == [8, 8, 8]
    assert [run.pair for run in plan.runs[:12]] == ["first"] * 4 + ["second"] * 4 + ["first"] * 4
    assert len(plan.runs) == 32
    assert cases.plan(THREE, budget_minutes=20.0, repeats=4).pairs[0].looks == (2, 4)


def test_the_command_lines_budget_wins_over_the_suites(cases: Project) -> None:
    text = PAIR + "budget_minutes: 30\n"
    assert cases.plan(text).budget_minutes == 30.0
    assert cases.plan(text, budget_minutes=5.0).budget_minutes == 5.0
    assert (cases.plan(PAIR).budget_minutes, cases.plan(PAIR).pairs[0].looks) == (None, ())
