# SPDX-License-Identifier: Apache-2.0
"""One run's verdict: every way in which a run can be wrong, and that none of them passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lora_suite.config import load_recipe
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import RunVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.model import DeclaredCheck
from tests.judge.helpers import (
    DONE,
    FULL,
    LORA,
    LOSS_FALLS,
    ROOT,
    make_case,
    planned,
    states,
    write_run,
)
from tests.judge.runs import judged, put, record


def test_metrics_of_another_run_of_the_same_length_are_missing(tmp_path):
    case = make_case()
    folders = [
        write_run(tmp_path / str(repeat), case, repeat, step_time=0.1 * repeat, sealed=True)
        for repeat in (1, 2)
    ]
    assert [judge_run(case, planned(), folder, DONE).state for folder in folders] == ["PASS", "PASS"]
    first, second = (folder / "metrics.json" for folder in folders)
    ours, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(ours)
    for folder in folders:
        verdict = judge_run(case, planned(), folder, DONE)
        assert verdict.state == verdict.own_state == "MISSING"
        assert "metrics.json is not the one that this run left" in verdict.message


@pytest.mark.parametrize("stem", [FULL, LORA])
def test_a_healthy_run_passes_with_its_figures(tmp_path, stem):
    verdict = judged(tmp_path, stem=stem, seconds=12.5)
    assert verdict.state == "PASS"
    assert verdict.message == ""
    assert (verdict.steps_done, verdict.steps_planned, verdict.seconds) == (10, 10, 12.5)
    # Step 1 takes 5.1 s and is warm-up; 3·exp(-1) is the loss at step 10.
    assert verdict.summary == pytest.approx(
        {"final_loss": 1.1036383, "median_step_time": 0.1, "peak_memory_gib": 0.5}
    )
    assert [check.value for check in verdict.checks if check.kind == "check"] == ["1.103638323514327"]


@pytest.mark.parametrize(
    ("share", "notes"), [(0.79, []), (0.80, []), (0.85, ["took 85 % of the 3 minutes that it may take"])]
)
def test_a_run_that_came_close_to_its_limit_says_so(tmp_path, share, notes):
    verdict = judged(tmp_path, seconds=share * 180.0)
    assert make_case().minutes == 3
    assert (verdict.state, verdict.notes) == ("PASS", notes)


def test_the_floor_of_a_step_is_its_time_over_the_recorded_ratio(tmp_path):
    def twice(metrics, record):
        metrics["performance/floor_ratio"] = dict.fromkeys(metrics["timing/train/step_time"], 4.0)

    assert judged(tmp_path, twice).summary["floor_time"] == pytest.approx(0.1 / 4.0)


def test_every_required_invariant_is_judged(tmp_path):
    verdict = judged(tmp_path, stem=LORA)
    assert [check.name for check in verdict.checks if check.kind == "invariant"] == list(REQUIRED_INVARIANTS)


class TestHowItEnded:
    """A run that broke is ERROR with rank, step and last lines, however good its files look."""

    @pytest.mark.parametrize("how", ["failed", "killed", "oom", "timeout"])
    def test_a_broken_run_is_an_error(self, tmp_path, how):
        ended = Ended(
            how=how, status=137, rank=1, step=7, message="rank 1 in step 7: gone", last_lines=["a", "b"]
        )
        verdict = judged(tmp_path, ended=ended)
        assert verdict.state == verdict.own_state == "ERROR"
        assert "rank 1 in step 7: gone" in verdict.message
        assert verdict.message.splitlines()[1:] == ["  a", "  b"]
        assert verdict.checks == []

    def test_rank_and_step_are_named_where_the_message_does_not(self, tmp_path):
        verdict = judged(tmp_path, ended=Ended(how="failed", status=3, rank=1, step=7, message="KeyError: x"))
        assert verdict.message == "crashed: rank 1, step 7: KeyError: x"

    def test_a_broken_run_without_files_is_an_error_too(self, tmp_path):
        verdict = judge_run(make_case(), planned(), tmp_path / "none", Ended(how="failed", status=3))
        assert (verdict.state, verdict.message) == ("ERROR", "crashed: exit status 3")

    def test_an_interrupted_run_is_missing(self, tmp_path):
        verdict = judged(tmp_path, ended=Ended(how="interrupted", status=130, message="after step 4 of 10"))
        assert (verdict.state, verdict.message) == ("MISSING", "after step 4 of 10")

    def test_the_record_says_how_it_ended_where_the_launcher_does_not(self, tmp_path):
        assert judged(tmp_path, ended=None).state == "PASS"

    def test_a_run_of_unknown_end_is_missing(self, tmp_path):
        verdict = judged(tmp_path, lambda metrics, record: record.pop("ended"), ended=None)
        assert (verdict.state, verdict.message) == ("MISSING", "nothing says how the run ended")

    @pytest.mark.parametrize("status", [1, 2, 3, 4, 5, 77])
    def test_a_driver_that_disagrees_with_a_good_run_is_an_error(self, tmp_path, status):
        verdict = judged(tmp_path, ended=Ended(how="done", status=status))
        assert verdict.state == verdict.own_state == "ERROR"
        assert f"status {status}" in verdict.message

    def test_status_1_is_explained_by_a_failed_check(self, tmp_path):
        checks = (DeclaredCheck('data["train/loss"]["10"] < 1.0', line=6),)
        assert judged(tmp_path, ended=Ended(how="done", status=1), checks=checks).state == "FAIL"

    def test_status_0_does_not_hide_a_failed_check(self, tmp_path):
        checks = (DeclaredCheck('data["train/loss"]["10"] < 1.0', line=6),)
        verdict = judged(tmp_path, checks=checks)
        assert verdict.state == "FAIL"
        assert verdict.own_state == "PASS"
        assert verdict.checks[0].margin_percent == pytest.approx(-10.3638, abs=1e-3)
        assert verdict.checks[0].source.endswith(f"{FULL}.sh:6")

    def test_a_status_that_no_judging_driver_has_is_not_explained_by_a_failed_check(self, tmp_path):
        checks = (DeclaredCheck('data["train/loss"]["10"] < 1.0', line=6),)
        assert judged(tmp_path, ended=Ended(how="done", status=77), checks=checks).state == "ERROR"


class TestIdentity:
    """Files of another run are no evidence."""

    LAUNCHED = datetime(2026, 3, 1, 12, 0, 0, 500_000, tzinfo=UTC)

    @pytest.mark.parametrize(
        ("started", "state"),
        [
            ("2026-03-01T11:59:59+00:00", "MISSING"),
            ("2026-02-28T23:00:00+00:00", "MISSING"),
            ("yesterday", "MISSING"),
            # Records are in whole seconds: the second of the launch is this run's.
            ("2026-03-01T12:00:00+00:00", "PASS"),
            ("2026-03-01T13:00:01+01:00", "PASS"),
            # Without a zone it is this machine's time, here a day after the launch whatever the zone.
            ("2026-03-02T12:00:00", "PASS"),
        ],
    )
    def test_a_run_that_started_before_its_launch_is_stale(self, tmp_path, started, state):
        verdict = judged(tmp_path, record(started=started), launched=self.LAUNCHED)
        assert verdict.state == state

    def test_a_run_of_another_recipe_is_not_the_planned_one(self, tmp_path):
        def damage(metrics, record):
            record["recipe"] = json.loads(json.dumps(record["recipe"]))
            record["recipe"]["sft"]["seed"] = 7

        verdict = judged(tmp_path, damage)
        assert verdict.state == "MISSING"
        assert "sft.seed is 7" in verdict.message


class TestResumed:
    """A run that continues a checkpoint has its own steps only."""

    def test_steps_before_the_first_segment_are_not_asked_for(self, tmp_path):
        def damage(metrics, record):
            record["segments"] = [4]
            for series in metrics.values():
                for step in ("1", "2", "3"):
                    series.pop(step, None)

        assert judged(tmp_path, damage).state == "PASS"

    def test_invariants_of_the_first_steps_are_then_not_judged(self, tmp_path):
        verdict = judged(tmp_path, record(segments=[4], invariants=[]), stem=LORA)
        at_start = ("step1_loss_equals_base", "b_gradients_step1", "a_gradients_step2")
        assert not {*at_start} & {check.name for check in verdict.checks}
        assert [text.split(" ")[0] for text in verdict.not_judged] == list(at_start)


class TestInvariants:
    """What must hold in every LoRA run."""

    @pytest.mark.parametrize("name", REQUIRED_INVARIANTS)
    def test_an_absent_one_is_missing(self, tmp_path, name):
        def damage(metrics, record):
            record["invariants"] = [each for each in record["invariants"] if each["name"] != name]

        verdict = judged(tmp_path, damage, stem=LORA)
        assert verdict.state == "MISSING"
        assert states(verdict)[name] == "MISSING"

    @pytest.mark.parametrize(("ok", "state"), [(False, "FAIL"), (None, "MISSING")])
    @pytest.mark.parametrize("name", REQUIRED_INVARIANTS)
    def test_a_broken_or_unmeasured_one_does_not_pass(self, tmp_path, name, ok, state):
        def damage(metrics, record):
            next(each for each in record["invariants"] if each["name"] == name)["ok"] = ok

        verdict = judged(tmp_path, damage, stem=LORA)
        assert verdict.state == state
        assert states(verdict)[name] == state

    def test_a_broken_one_is_not_hidden_by_a_second_entry(self, tmp_path):
        def damage(metrics, record):
            record["invariants"].insert(0, {"name": "adapters_moved", "ok": False, "message": "0 of 12"})

        assert judged(tmp_path, damage, stem=LORA).state == "FAIL"

    def test_a_further_one_counts_too(self, tmp_path):
        def damage(metrics, record):
            record["invariants"].append({"name": "new_one", "ok": False, "message": ""})

        assert judged(tmp_path, damage, stem=LORA).state == "FAIL"

    def test_where_b_does_not_start_at_zero_the_loss_may_differ_from_the_base(self, tmp_path):
        stem = "sft-tiny-llama-1n2c-megatron-tp2-lora"
        name = "step1_loss_equals_base"
        resolved = load_recipe(
            ROOT / "recipes" / f"{stem}.yaml", ["policy.megatron_cfg.lora_cfg.lora_B_init_method=normal"]
        )
        case = replace(make_case(stem), recipe=resolved.recipe, tree=resolved.tree)

        def unmeasured(metrics, record):
            next(each for each in record["invariants"] if each["name"] == name)["ok"] = None

        verdict = judge_run(case, planned(stem), write_run(tmp_path, case, damage=unmeasured), DONE)
        assert verdict.state == "PASS"
        assert verdict.not_judged == [f"{name} (B does not start at zero)"]

    def test_a_run_of_one_step_has_no_second(self, tmp_path):
        case = make_case(LORA, (), steps=1)
        verdict = judge_run(case, planned(LORA), write_run(tmp_path, case, steps=1), DONE)
        assert verdict.state == "PASS"
        assert verdict.not_judged == ["a_gradients_step2 (the run has one step)"]

    def test_a_full_run_has_none(self, tmp_path):
        assert all(check.kind != "invariant" for check in judged(tmp_path).checks)


class TestConditions:
    """`--when` and `--on` of a driver's checks."""

    IMPOSSIBLE = 'data["train/loss"]["10"] < 0.0'

    @pytest.mark.parametrize(
        ("when", "state"),
        [
            ("policy.init=random", "FAIL"),
            ("policy.init=pretrained", "PASS"),
            ("policy.dtensor_cfg.enabled=true", "FAIL"),
            ("policy.dtensor_cfg.enabled=false", "PASS"),
            ("policy.no_such_key=1", "PASS"),
        ],
    )
    def test_a_check_applies_where_its_condition_holds(self, tmp_path, when, state):
        checks = (
            DeclaredCheck(self.IMPOSSIBLE, line=6, call=6, when=when),
            DeclaredCheck(LOSS_FALLS, line=7, call=7),
        )
        verdict = judged(tmp_path, checks=checks)
        assert verdict.state == state
        assert len(verdict.not_judged) == (state == "PASS")

    def limits(self, gpu: str | None, tmp_path: Path) -> RunVerdict:
        def damage(metrics, record):
            record["environment"]["strict"]["device"] = gpu

        checks = (
            DeclaredCheck(self.IMPOSSIBLE, line=6, call=6, on="H200"),
            DeclaredCheck(LOSS_FALLS, line=7, call=6, on="H100"),
        )
        return judged(tmp_path, damage, checks=checks)

    def test_only_the_limit_of_this_gpu_counts(self, tmp_path):
        assert self.limits("NVIDIA H200", tmp_path).state == "FAIL"

    def test_the_others_are_named(self, tmp_path):
        verdict = self.limits("NVIDIA h100 80GB HBM3", tmp_path)
        assert verdict.state == "PASS"
        assert verdict.not_judged == [f"{self.IMPOSSIBLE} (limit for H200, this is NVIDIA h100 80GB HBM3)"]

    @pytest.mark.parametrize("gpu", ["NVIDIA B200", None])
    def test_a_gpu_without_a_limit_is_inconclusive(self, tmp_path, gpu):
        verdict = self.limits(gpu, tmp_path)
        assert verdict.state == "INCONCLUSIVE"
        assert (
            verdict.checks[0].message
            == f"no limit is known for {gpu or 'an unknown device'}, only for H200, H100"
        )


@pytest.mark.parametrize(
    ("expression", "state", "words"),
    [
        ('mean(data["train/los"]) < 3', "MISSING", '"train/los"'),
        ('data["train/loss"]["11"] < 3', "MISSING", "no step 11"),
        ('max(data["ray/node.0.gpu.0.mem_gb"]) < 60', "MISSING", "ray/node.0.gpu.0.mem_gb"),
        ('worst(data["ray/node.*.gpu.*.mem_gb"]) < 60', "MISSING", "ray/node"),
        ('mean(data["train/loss"]', "ERROR", "never closed"),
        ('mean(other["train/loss"]) < 3', "ERROR", "other"),
    ],
)
def test_a_check_that_cannot_be_answered_does_not_pass(tmp_path, expression, state, words):
    verdict = judged(tmp_path, checks=(DeclaredCheck(expression, line=6),))
    assert verdict.state == state
    assert words in verdict.checks[0].message


@pytest.mark.parametrize(
    ("expression", "state"),
    [
        ('"10" in data["train/loss"]', "PASS"),
        ('"11" in data["train/loss"]', "FAIL"),
        ('not "11" in data["train/loss"]', "PASS"),
        ('"10" in data["train/los"]', "MISSING"),
        ('all_finite(data["train/loss"])', "PASS"),
    ],
)
def test_a_check_may_ask_what_is_there(tmp_path, expression, state):
    assert judged(tmp_path, checks=(DeclaredCheck(expression, line=6),)).state == state


def test_a_metric_may_have_the_name_of_a_pattern(tmp_path):
    def damage(metrics, record):
        metrics["custom[0]"] = {"1": 5.0}

    checks = (DeclaredCheck('data["custom[0]"]["1"] < 3', line=6),)
    assert judged(tmp_path, damage, checks=checks).state == "FAIL"
    missing = (DeclaredCheck('data["custom?0?"]["1"] < 3', line=6),)
    assert judged(tmp_path / "b", damage, checks=missing).state == "MISSING"


def _memory(metrics: dict[str, Any], record: dict[str, Any]) -> None:
    del metrics["memory/peak_allocated_gib"]
    metrics["ray/node.0.gpu.0.mem_gb"] = {"0": 1.0, "17": 52.07}
    metrics["ray/node.0.gpu.1.mem_gb"] = {"0": 1.0, "17": 52.06}


def test_sampled_memory_is_the_peak_where_the_allocator_says_nothing(tmp_path):
    assert judged(tmp_path, _memory).summary["peak_memory_gib"] == 52.07


def test_the_term_that_binds_the_floor_is_the_records(tmp_path):
    terms = {"arithmetic": 0.1, "memory": 0.2, "communication": 0.0, "update": 0.0, "bound_by": "memory"}
    damage = lambda metrics, record: record.update(floor=terms)  # noqa: E731
    assert judged(tmp_path / "one", damage).floor_bound == "memory"
    assert judged(tmp_path / "other").floor_bound == ""


def test_not_finite_figures_are_left_out_of_the_summary(tmp_path):
    """verdict.json holds finite numbers alone."""
    damage: Callable[..., None] = put("train/loss", 10, None)
    assert "final_loss" not in judged(tmp_path, damage).summary


def test_the_verdict_says_where_a_tracker_shows_the_run(tmp_path):
    link = "wandb/offline-run-20260101_000000-abc"
    assert judged(tmp_path, damage=record(link=link)).link == link
