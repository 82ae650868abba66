# SPDX-License-Identifier: Apache-2.0
"""Damaged data of a run: lost, broken, short, unreadable; none of it passes."""

from __future__ import annotations

import pytest

from lora_suite.judge.run import judge_run
from tests.judge.helpers import DONE, FULL, LORA, Damage, healthy, make_case, planned, write_run
from tests.judge.runs import cut, drop, empty, judged, put, record

NOT_PASSING: dict[str, tuple[Damage, str, str]] = {
    "other case": (record(case=LORA), "MISSING", f"run.json is of case {LORA}"),
    "other step count": (record(steps_done=9), "MISSING", "counts 9 steps"),
    "no metrics at all": (lambda metrics, _: metrics.clear(), "MISSING", "counts 10 steps"),
    "empty loss": (empty("train/loss"), "MISSING", "counts 10 steps"),
    "hole in loss": (cut("train/loss", 4, 5), "MISSING", "no value at step 4-5"),
    "no step time": (drop("timing/train/step_time"), "MISSING", "not in metrics.json"),
    "no total": (drop("timing/train/total_step_time"), "MISSING", "not in metrics.json"),
    "no tokens": (drop("train/global_valid_toks"), "MISSING", "not in metrics.json"),
    "empty step time": (empty("timing/train/step_time"), "MISSING", "empty"),
    "short step time": (cut("timing/train/step_time", 9, 10), "MISSING", "no value at step 9-10"),
    "hole in memory": (cut("memory/peak_allocated_gib", 2), "MISSING", "no value at step 2"),
    "null loss": (put("train/loss", 3, None), "FAIL", "not finite at step 3"),
    "null last loss": (put("train/loss", 10, None), "FAIL", "not finite at step 10"),
    "nan as text": (put("train/grad_norm", 3, "nan"), "FAIL", "not finite at step 3"),
    "null validation": (put("validation/loss", 10, None), "FAIL", "not finite at step 10"),
    "recorded as not finite": (record(nonfinite={"train/loss": [6]}), "FAIL", "not finite at step 6"),
}


@pytest.mark.parametrize(("damage", "state", "words"), NOT_PASSING.values(), ids=NOT_PASSING.keys())
def test_damaged_data_never_pass(tmp_path, damage, state, words):
    verdict = judged(tmp_path, damage)
    assert verdict.state == state
    assert words in " ".join([verdict.message, *(check.message for check in verdict.checks)])


@pytest.mark.parametrize("stem", [FULL, LORA])
def test_no_single_value_can_be_lost_or_broken_unseen(tmp_path, stem):
    case = make_case(stem, ())
    whole, _ = healthy(case, 1)
    for name in whole:
        for step in whole[name]:
            place = tmp_path / name.replace("/", "-") / step
            broken = judge_run(
                case, planned(stem), write_run(place, case, damage=put(name, int(step), None)), DONE
            )
            assert broken.state == "FAIL", (name, step)
            if name != "validation/loss":
                lost = judge_run(
                    case, planned(stem), write_run(place, case, damage=cut(name, int(step))), DONE
                )
                assert lost.state == "MISSING", (name, step)


def test_series_that_are_not_ours_are_left_to_the_checks(tmp_path):
    def damage(metrics, record):
        metrics["custom/metric"] = {"1": None, "7": 3.0}

    assert judged(tmp_path, damage).state == "PASS"


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_short_run_is_missing_whatever_its_checks_would_say(tmp_path, steps):
    verdict = judged(tmp_path, steps=steps)
    assert (verdict.state, verdict.message) == ("MISSING", f"reached {steps} of 10 steps")
    assert verdict.steps_done == steps
    assert verdict.checks == []


def test_more_steps_than_declared_are_fine(tmp_path):
    assert judged(tmp_path, steps=12).state == "PASS"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.json", None, "metrics.json"),
        ("metrics.json", "", "counts 10 steps"),
        ("metrics.json", "{", "JSON"),
        ("metrics.json", "[]", "metrics.json"),
        ("metrics.json", '{"train/loss": 3}', "train/loss"),
        ("run.json", None, "no run.json"),
        ("run.json", "", "run.json is damaged"),
        ("run.json", "{}", "run.json is damaged"),
    ],
)
def test_unreadable_files_are_missing(tmp_path, name, content, words):
    case = make_case()
    run_dir = write_run(tmp_path / "run", case)
    (run_dir / name).unlink()
    if content is not None:
        (run_dir / name).write_text(content)
    verdict = judge_run(case, planned(), run_dir, DONE)
    assert verdict.state == "MISSING"
    assert words in verdict.message


@pytest.mark.parametrize("name", ["metrics.json", "run.json"])
def test_files_that_are_no_text_are_missing(tmp_path, name):
    case = make_case()
    run_dir = write_run(tmp_path / "run", case)
    (run_dir / name).write_bytes(b"\xff\xfe{}")
    assert judge_run(case, planned(), run_dir, DONE).state == "MISSING"


def test_a_run_without_a_directory_did_not_run(tmp_path):
    verdict = judge_run(make_case(), planned(), tmp_path / "none", None)
    assert (verdict.state, verdict.message) == ("MISSING", "did not run")
