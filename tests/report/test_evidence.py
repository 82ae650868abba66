# SPDX-License-Identifier: Apache-2.0
"""What stands beside a verdict: figures taken from the right arm, runs and nights, and the cause in words."""

from __future__ import annotations

import pytest

from lora_suite.judge.verdict import (
    Attribution,
    CaseHistory,
    Effect,
    MatchedSteps,
    Night,
    PairCheckVerdict,
    PhaseDelta,
)
from lora_suite.report.evidence import cause, of_pair_check, of_run_check
from tests.report.helpers import CASES, RATIO, check, curves, pair, run, suite

STEP_TIME = "timing/train/step_time"


def arms(**summaries: float):
    """A suite of one pair with one run an arm, and its ratio without matched steps."""
    runs = [
        run(case, pair="fsdp2", arm=arm, summary={"median_step_time": summaries[arm]})
        for arm, case in (("full", CASES[0]), ("lora", CASES[1]))
        if arm in summaries
    ]
    return suite(runs=runs, pairs=[pair()])


def evidence(verdict):
    """Of the first check of the first pair."""
    return of_pair_check(verdict, verdict.pairs[0], verdict.pairs[0].checks[0])


def history(case: str, values: list[float], metric: str = STEP_TIME) -> CaseHistory:
    """Nights with these values."""
    nights = [Night(started=f"2026-02-{day:02d}", value=value) for day, value in enumerate(values, start=1)]
    return CaseHistory(case=case, metric=metric, environment="e", nights=nights)


def test_before_is_the_reference_and_after_the_arm_that_is_measured_by_it():
    assert evidence(arms(full=0.1, lora=0.25)).change == "full 0.1 → lora 0.25 s"


def test_matched_steps_say_more_than_summaries():
    verdict = arms(full=0.1, lora=0.25)
    steps = MatchedSteps(repeat=1, steps=[4, 5, 6], left=[3.0, 4.0, 9.0], right=[1.0, 2.0, 2.5])
    verdict.pairs[0].checks[0].matched = [steps]
    assert evidence(verdict).change == "full 2 → lora 4 s"


def test_steps_that_are_left_out_count_for_nothing():
    verdict = arms(full=0.1, lora=0.25)
    steps = MatchedSteps(
        repeat=1, steps=[1, 2, 3, 4], left=[90, 80, 4, 4], right=[90, 80, 2, 2], trimmed=[1, 2]
    )
    verdict.pairs[0].checks[0].matched = [steps]
    assert evidence(verdict).change == "full 2 → lora 4 s"


def test_an_arm_without_figures_leaves_nothing_to_show():
    assert evidence(arms(full=0.1)).change == ""


def test_a_run_that_warms_the_machine_counts_for_nothing():
    verdict = arms(full=0.1, lora=0.25)
    verdict.runs.append(run(CASES[0], 0, pair="fsdp2", arm="full", summary={"median_step_time": 99.0}))
    assert evidence(verdict).change == "full 0.1 → lora 0.25 s"


def test_a_pair_that_reuses_runs_takes_those_of_its_cases():
    verdict = arms(full=0.1, lora=0.25)
    for each in verdict.runs:
        each.pair = "another"
    assert evidence(verdict).change == "full 0.1 → lora 0.25 s"


def test_curves_have_no_before_and_after():
    verdict = suite(pairs=[curves()])
    assert evidence(verdict).change == ""


def test_a_ratio_of_tails_is_none_of_typical_steps():
    verdict = arms(full=0.1, lora=0.25)
    verdict.pairs[0].checks[0].expression = RATIO.replace("ratio(", "tail_ratio(")
    assert evidence(verdict).change == ""


def test_nights_are_those_of_the_arm_that_is_measured():
    verdict = arms(full=0.1, lora=0.25)
    verdict.history = [
        history(CASES[0], [1.0]),
        history(CASES[1], [7.0], "train/loss"),
        history(CASES[1], [2, 3]),
    ]
    assert list(evidence(verdict).nights) == [2.0, 3.0]


def test_a_run_check_is_held_against_the_median_of_its_nights():
    verdict = suite(history=[history(CASES[0], [0.1, 0.3, 0.11])])
    shown = of_run_check(verdict, CASES[0], check("FAIL", name=f'mean(data["{STEP_TIME}"]) < 1', value="1.5"))
    assert (shown.change, list(shown.nights)) == ("0.11 → 1.5", [0.1, 0.3, 0.11])


def test_tonight_is_none_of_the_earlier_nights_and_one_night_no_course():
    name = f'mean(data["{STEP_TIME}"]) < 1'
    verdict = suite(history=[history(CASES[0], [0.1, 0.3])])
    verdict.started = "2026-02-02"
    assert of_run_check(verdict, CASES[0], check("FAIL", name=name, value="0.3")).change == "0.1 → 0.3"
    verdict = suite(history=[history(CASES[0], [0.3])])
    verdict.started = "2026-02-01"
    shown = of_run_check(verdict, CASES[0], check("FAIL", name=name, value="0.3"))
    assert (shown.change, list(shown.nights)) == ("", [])


@pytest.mark.parametrize("name", ["frozen_unchanged", 'last(data["train/loss"]) < 2'])
def test_a_check_without_a_history_stands_alone(name):
    verdict = suite(history=[history(CASES[0], [0.1])])
    shown = of_run_check(verdict, CASES[0], check("FAIL", name=name))
    assert (shown.change, list(shown.nights)) == ("", [])


def test_an_expression_that_cannot_be_read_has_no_evidence_but_what_it_holds():
    verdict = suite(pairs=[pair(checks=[PairCheckVerdict(expression="ratio(", state="ERROR")])])
    assert evidence(verdict).change == ""


def test_the_cause_in_words():
    def moved(estimate: float) -> Effect:
        low, high = estimate - 0.005, estimate + 0.005
        return Effect(
            estimate=estimate, low=low, high=high, confidence=0.95, repeats=4, smallest_detectable=None
        )

    told = cause(
        Attribution(
            moved="lora-only",
            reference="baseline",
            changes={"full": moved(1.0), "lora": moved(1.031)},
            phases=[
                PhaseDelta(phase="forward_backward", left=0.2, right=0.199),
                PhaseDelta(phase="optimizer", left=0.05, right=0.0575),
            ],
            message="confirmed once",
        )
    )
    assert told == (
        "only the LoRA arm moved against baseline; full +0.0 % [-0.5, +0.5]; lora +3.1 % [+2.6, +3.6]; "
        "optimizer +0.0075 s of +0.0065 s; confirmed once"
    )


def test_evidence_of_a_ratio_has_its_effect_and_limit():
    shown = evidence(arms(full=0.1, lora=0.25))
    assert shown.effect is not None
    assert (shown.effect.estimate, shown.limit) == (0.9312, 2.0)
    assert RATIO.endswith("< 2.0")
