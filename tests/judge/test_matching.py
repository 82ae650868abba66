# SPDX-License-Identifier: Apache-2.0
"""Pairs with an external arm: what may be compared step by step, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_suite.judge.pair import judge_pair
from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import PairVerdict, RunVerdict
from lora_suite.plan.external.dialect import load_dialect
from lora_suite.plan.model import ExternalCase
from tests.judge.helpers import FULL, LORA, RATIO, make_case, make_pair, planned, write_run

CURVES = 'max_rel_diff(lora["train/loss"], full["train/loss"]) < 1e-4'
BOUND = 'max(lora["train/loss"]) < 9'


def external_case() -> ExternalCase:
    """The LoRA case as if another trainer ran it."""
    ours = make_case(LORA)
    return ExternalCase(
        stem=ours.stem,
        tree=ours.tree,
        overrides=(),
        steps=ours.steps,
        minutes=1.0,
        checks=ours.checks,
        command=("true",),
        cwd=Path("/"),
        outputs=(Path("out"),),
        metrics=Path("out/metrics.json"),
        dialect=load_dialect("common", Path("x.yaml")),
        facts={"lora": True},
        recipe_tree=None,
        processes=2,
        source=Path("x.yaml"),
    )


def judged(
    tmp_path: Path, damage: Any, *, checks: tuple[str, ...] = (RATIO,), ratio: float = 0.5
) -> PairVerdict:
    """Two blocks; the LoRA arm is external, its files changed by `damage`."""

    def external(metrics: dict[str, Any], record: dict[str, Any]) -> None:
        record["dialect"] = "common"
        record["environment"] = None
        record["batches"] = {}
        damage(metrics)

    runs: dict[str, list[RunVerdict]] = {"full": [], "lora": []}
    for repeat in (1, 2):
        for arm, stem in (("full", FULL), ("lora", LORA)):
            folder = write_run(
                tmp_path / arm / str(repeat),
                make_case(stem),
                repeat,
                step_time=0.1 * (ratio if arm == "lora" else 1.0),
                damage=external if arm == "lora" else None,
            )
            case = make_case(stem) if arm == "full" else external_case()
            runs[arm].append(judge_run(case, planned(stem, repeat), folder, None))
    return judge_pair(make_pair(repeats=2, checks=checks), runs)


def test_equal_token_counts_match_steps_and_are_called_weak(tmp_path: Path) -> None:
    pair = judged(tmp_path, lambda metrics: None, checks=(RATIO, CURVES))
    assert pair.state == "PASS"
    assert pair.notes == [
        "batches are matched by their number of supervised tokens alone, which is weak evidence"
    ]


def test_other_token_counts_are_other_batches(tmp_path: Path) -> None:
    def damage(metrics: dict[str, Any]) -> None:
        metrics["train/global_valid_toks"]["4"] = 99

    pair = judged(tmp_path, damage)
    assert pair.own_state == "INCOMPARABLE"
    assert pair.message == (
        "full and lora had different numbers of supervised tokens at step 4 of run 1 (104 and 99)"
    )


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_without_token_counts_medians_are_compared(tmp_path: Path, ratio: float) -> None:
    pair = judged(tmp_path, lambda metrics: metrics.pop("train/global_valid_toks"), ratio=ratio)
    check, *_ = pair.checks
    assert check.effect is not None
    assert check.effect.estimate == pytest.approx(ratio)
    assert check.state == ("PASS" if ratio < 0.8 else "FAIL")
    assert pair.notes == ["steps are not matched: lora says nothing of its batches; medians are compared"]


def test_medians_do_not_need_equal_steps(tmp_path: Path) -> None:
    def damage(metrics: dict[str, Any]) -> None:
        del metrics["train/global_valid_toks"]
        times = metrics["timing/train/step_time"]
        # Logged at every second step only.
        metrics["timing/train/step_time"] = {step: times[step] for step in times if int(step) % 2 == 0}

    check, *_ = judged(tmp_path, damage).checks
    assert check.state == "PASS"


def test_what_needs_equal_steps_is_incomparable_without_counts(tmp_path: Path) -> None:
    pair = judged(
        tmp_path, lambda metrics: metrics.pop("train/global_valid_toks"), checks=(RATIO, CURVES, BOUND)
    )
    assert [check.state for check in pair.checks] == ["PASS", "INCOMPARABLE", "PASS", "PASS"]
    assert pair.state == "INCOMPARABLE"


def test_peaks_do_not_need_equal_steps(tmp_path: Path) -> None:
    def damage(metrics: dict[str, Any]) -> None:
        del metrics["train/global_valid_toks"]
        metrics["memory/peak_allocated_gib"] = {str(step): 0.25 for step in range(2, 11, 2)}

    peaks = 'peak_ratio(lora["memory/peak_allocated_gib"], full["memory/peak_allocated_gib"]) < 0.8'
    (check,) = judged(tmp_path, damage, checks=(peaks,)).checks
    assert (check.state, check.value) == ("PASS", "0.5")


def test_medians_of_nothing_are_inconclusive(tmp_path: Path) -> None:
    def damage(metrics: dict[str, Any]) -> None:
        del metrics["train/global_valid_toks"]

    text = RATIO.replace(") <", ", 1, 4) <")
    check = judged(tmp_path, damage, checks=(text,)).checks[0]
    assert check.state == "INCONCLUSIVE"
    assert check.message == "run 1: no step is left after the first 3 (warm-up)"


def short_and_long(tmp_path: Path, *, tokens: float, different: bool = True, **pair: Any) -> PairVerdict:
    """Two blocks of two runs of one case, whose rows differ; tokens: how many a second of the long ones."""
    runs: dict[str, list[RunVerdict]] = {"short": [], "long": []}
    for repeat in (1, 2):
        for arm, stem in (("short", FULL), ("long", LORA)):

            def damage(metrics: dict[str, Any], record: dict[str, Any], arm: str = arm) -> None:
                record["batches"] = {step: f"{arm}-{step}" for step in record["batches"]}
                record["environment"]["strict"]["world_size"] = 1 if arm == "short" else 2
                # The long rows' step takes now more, now less, and so do their tokens.
                metrics["performance/tokens_per_sec_per_gpu"] = {
                    step: 1000.0 if arm == "short" else tokens * (1.0 + 0.01 * (int(step) % 3 - 1))
                    for step in metrics["train/loss"]
                }

            folder = write_run(tmp_path / arm / str(repeat), make_case(stem), repeat, damage=damage)
            runs[arm].append(judge_run(make_case(stem), planned(stem, repeat), folder, None))
    name = "performance/tokens_per_sec_per_gpu"
    settings: dict[str, Any] = {
        "arms": {"short": FULL, "long": LORA},
        "different_batches": different,
        "allow": ("data.train", "cluster.gpus_per_node"),
        "checks": (
            f'ratio(short["{name}"], long["{name}"]) <= 1.10',
            f'ratio(long["{name}"], short["{name}"]) <= 1.10',
        ),
    }
    return judge_pair(make_pair(repeats=2, **settings | pair), runs)


@pytest.mark.parametrize(
    ("tokens", "states"),
    [(950.0, ["PASS", "PASS"]), (880.0, ["FAIL", "PASS"]), (1150.0, ["PASS", "FAIL"])],
)
def test_arms_that_are_meant_to_differ_in_their_rows_are_compared_by_medians(
    tmp_path: Path, tokens: float, states: list[str]
) -> None:
    pair = short_and_long(tmp_path, tokens=tokens)
    assert [check.state for check in pair.checks] == states
    effects = [check.effect.estimate for check in pair.checks if check.effect is not None]
    assert effects == [pytest.approx(1000.0 / tokens), pytest.approx(tokens / 1000.0)]
    assert pair.notes == [
        "steps are not matched: the arms are meant to see different batches; medians are compared"
    ]


def test_without_that_word_other_rows_are_incomparable(tmp_path: Path) -> None:
    pair = short_and_long(tmp_path, tokens=950.0, different=False)
    assert (pair.own_state, pair.message) == (
        "INCOMPARABLE",
        "short and long saw different batches at step 1 of run 1",
    )


def test_curves_of_arms_that_see_other_rows_are_incomparable(tmp_path: Path) -> None:
    curves = 'max_rel_diff(long["train/loss"], short["train/loss"]) < 1e-4'
    (check,) = short_and_long(tmp_path, tokens=950.0, checks=(curves,)).checks
    assert check.state == "INCOMPARABLE"


def test_a_count_of_ranks_that_the_pair_does_not_allow_is_another_environment(tmp_path: Path) -> None:
    pair = short_and_long(tmp_path, tokens=950.0, allow=("data.train",))
    assert pair.own_state == "INCOMPARABLE"
    assert "different environments (world_size: 1 and 2)" in pair.message


def test_what_was_not_compared_is_named(tmp_path: Path) -> None:
    runs: dict[str, list[RunVerdict]] = {"full": [], "lora": []}
    for arm, stem in (("full", FULL), ("lora", LORA)):
        for repeat in (1, 2):
            folder = write_run(tmp_path / arm / str(repeat), make_case(stem), repeat, step_time=0.01)
            runs[arm].append(judge_run(make_case(stem), planned(stem, repeat), folder, None))
    pair = judge_pair(make_pair(repeats=2, not_compared=("dtype", "optimizer")), runs)
    assert pair.notes == ["not compared, as an arm does not say it: dtype, optimizer"]
