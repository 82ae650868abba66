# SPDX-License-Identifier: Apache-2.0
"""One pair's verdict: what makes it incomparable or missing, and what its checks say over the repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_suite.judge.pair import judge_pair
from lora_suite.judge.run import judge_run
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Difference
from tests.judge.helpers import LORA, Damage, make_case, make_pair, planned
from tests.judge.pairs import FULL_TIMES, SAME_LOSS, every, judged, only, ratio, runs
from tests.judge.runs import record


class TestComparable:
    """Steps are matched only where that is allowed."""

    def test_arms_that_differ_too_much_are_incomparable(self, tmp_path):
        pair = make_pair(
            not_comparable=(
                Difference("sft.seed", 42, 7),
                Difference("policy.precision", "float32", "bfloat16"),
            )
        )
        verdict = judged(tmp_path, pair=pair)
        assert verdict.state == "INCOMPARABLE"
        assert verdict.message == (
            "arms differ in sft.seed (42 and 7); policy.precision ('float32' and 'bfloat16')"
        )
        assert verdict.checks == []

    @pytest.mark.parametrize(
        ("batches", "step"),
        [
            ({**{str(step): f"batch-{step}" for step in range(1, 11)}, "4": "other", "6": "other"}, 4),
            ({str(step): f"batch-{step}" for step in range(1, 10)}, 10),
            ({}, 1),
        ],
    )
    @pytest.mark.parametrize("arm", ["full", "lora"])
    def test_other_batches_are_incomparable(self, tmp_path, batches, step, arm):
        verdict = judged(tmp_path, only(arm, 2, record(batches=batches)))
        assert verdict.state == "INCOMPARABLE"
        assert verdict.message == f"full and lora saw different batches at step {step} of run 2"

    def test_without_any_fingerprint_nothing_is_matched(self, tmp_path):
        assert judged(tmp_path, lambda arm, repeat: record(batches={})).state == "INCOMPARABLE"

    def test_another_environment_is_incomparable(self, tmp_path):
        other = {"strict": {"device": None, "torch": "2.11.0"}, "soft": {}}
        verdict = judged(tmp_path, only("lora", 3, record(environment=other)))
        assert verdict.state == "INCOMPARABLE"
        assert verdict.message == (
            "full run 1 and lora run 3 ran in different environments (torch: 2.13.0 and 2.11.0)"
        )

    def test_facts_of_one_backend_alone_and_soft_ones_are_no_difference(self, tmp_path):
        other = {
            "strict": {"device": None, "torch": "2.13.0", "megatron-core": "0.16.1"},
            "soft": {"host": "b"},
        }
        assert judged(tmp_path, every("lora", record(environment=other))).state == "PASS"


class TestLacking:
    """A pair whose arms were not all measured is MISSING and says which run."""

    @pytest.mark.parametrize(
        ("ended", "words"),
        [
            (
                Ended(how="oom", status=1, message="CUDA out of memory"),
                "ERROR out of memory: CUDA out of memory",
            ),
            (Ended(how="interrupted", status=130, message="after step 3"), "MISSING after step 3"),
        ],
    )
    def test_a_broken_run_is_named_and_the_rest_is_judged(self, tmp_path, ended, words):
        arms = runs(tmp_path)
        case = make_case(LORA)
        arms["lora"][1] = judge_run(case, planned(LORA, 2), tmp_path / LORA / "2", ended)
        verdict = judge_pair(make_pair(), arms)
        assert verdict.state == verdict.own_state == "MISSING"
        assert verdict.message == f"lora run 2: {words}"
        assert verdict.checks[0].state == "PASS"
        assert verdict.checks[0].effect is not None
        assert verdict.checks[0].effect.repeats == 3
        assert "judged on 3 of 4 repeats" in verdict.notes

    def test_a_run_with_holes_is_named_by_its_series(self, tmp_path):
        def hole(metrics, record):
            del metrics["timing/train/step_time"]["5"]

        verdict = judged(tmp_path, only("full", 4, hole))
        assert verdict.state == "MISSING"
        assert verdict.message == "full run 4: MISSING no value at step 5"

    def test_fewer_runs_than_repeats_are_missing(self, tmp_path):
        verdict = judged(tmp_path, full=FULL_TIMES[:3])
        assert verdict.state == "MISSING"
        assert verdict.message == "full run 4: not planned"

    def test_no_run_at_all(self):
        verdict = judge_pair(make_pair(repeats=1), {})
        assert (verdict.state, verdict.checks) == ("MISSING", [])

    def test_incomparable_and_lacking_is_missing_and_says_both(self, tmp_path):
        pair = make_pair(not_comparable=(Difference("sft.seed", 42, 7),))
        verdict = judged(tmp_path, pair=pair, full=FULL_TIMES[:3])
        assert verdict.state == "MISSING"
        assert verdict.message == "arms differ in sft.seed (42 and 7); full run 4: not planned"

    def test_a_run_that_only_failed_a_check_was_measured(self, tmp_path):
        def frozen(metrics, record):
            record["invariants"][-1]["ok"] = False

        arms = runs(tmp_path, every("lora", frozen))
        assert {run.state for run in arms["lora"]} == {"FAIL"}
        assert judge_pair(make_pair(), arms).state == "PASS"

    @pytest.mark.parametrize("checks", [(), ('ratio(lora["x"], full["x"]) < 1',)])
    def test_no_check_and_no_data_do_not_pass(self, tmp_path, checks):
        assert judged(tmp_path, pair=make_pair(checks=checks)).state == "MISSING"

    @pytest.mark.parametrize("text", ['ratio(lora["train/loss"], base["train/loss"]) < 1', "ratio("])
    def test_a_check_that_cannot_be_read_is_an_error(self, tmp_path, text):
        assert judged(tmp_path, pair=make_pair(checks=(text,))).state == "ERROR"

    def test_values_that_are_not_finite_do_not_pass(self, tmp_path):
        def nan(metrics, record):
            metrics["timing/train/step_time"]["8"] = None

        assert judged(tmp_path, only("lora", 1, nan)).state == "INCONCLUSIVE"


class TestOtherChecks:
    """What is no ratio is evaluated on every repeat; the worst decides."""

    PAIR = make_pair(checks=(SAME_LOSS,))

    def test_all_repeats_agree(self, tmp_path):
        verdict = judged(tmp_path, pair=self.PAIR)
        assert verdict.state == "PASS"
        assert (verdict.checks[0].value, verdict.checks[0].limit) == ("0", 0.001)

    def test_the_worst_repeat_decides_and_is_named(self, tmp_path):
        def off(share: float) -> Damage:
            def damage(metrics, record):
                metrics["train/loss"]["1"] *= 1 + share

            return damage

        shares = {2: 1.5e-3, 3: 2e-3, 4: 5e-4}
        verdict = judged(
            tmp_path, lambda arm, repeat: off(shares.get(repeat, 0) if arm == "full" else 0), self.PAIR
        )
        assert verdict.state == "FAIL"
        assert float(verdict.checks[0].value) == pytest.approx(2e-3)
        assert verdict.checks[0].message.startswith("run 3: ")

    def test_a_passed_check_names_the_repeat_nearest_to_the_limit(self, tmp_path):
        def damage(metrics, record):
            metrics["train/loss"]["1"] *= 1 + 5e-4

        verdict = judged(tmp_path, only("full", 4, damage), self.PAIR)
        assert verdict.state == "PASS"
        assert float(verdict.checks[0].value) == pytest.approx(5e-4)
        assert verdict.checks[0].message == "nearest to the limit in run 4"

    def test_a_nan_fails(self, tmp_path):
        def damage(metrics, record):
            metrics["train/loss"]["2"] = None

        verdict = judged(tmp_path, only("full", 2, damage), self.PAIR)
        assert verdict.state == "FAIL"
        assert "not finite at step 2" in verdict.checks[0].message

    def test_data_that_one_repeat_lacks_are_missing(self, tmp_path):
        def no_validation(metrics, record):
            del metrics["validation/loss"]

        pair = make_pair(checks=(SAME_LOSS.replace("train", "validation"),))
        verdict = judged(tmp_path, only("lora", 3, no_validation), pair)
        assert verdict.state == "MISSING"
        assert verdict.checks[0].message == 'run 3: lora["validation/loss"] is not in metrics.json'

    def test_one_repeat_is_enough(self, tmp_path):
        pair = make_pair(repeats=1, checks=(SAME_LOSS,))
        assert judged(tmp_path, pair=pair, full=[0.1], lora=[0.1]).state == "PASS"

    def test_a_ratio_that_must_equal_something_has_no_interval(self, tmp_path):
        verdict = judged(tmp_path, pair=ratio("==", 1.0, "train/loss"))
        assert (verdict.state, verdict.checks[0].effect) == ("PASS", None)

    def test_an_offset_of_the_loss(self, tmp_path):
        def off(metrics, record):
            metrics["train/loss"] = {step: 1.001 * value for step, value in metrics["train/loss"].items()}

        pair = make_pair(checks=('abs(mean_rel_diff(lora["train/loss"], full["train/loss"])) < 5e-4',))
        verdict = judged(tmp_path, only("lora", 2, off), pair)
        assert verdict.state == "FAIL"
        assert float(verdict.checks[0].value) == pytest.approx(1e-3)
        assert verdict.checks[0].message.startswith("run 2: ")

    def test_peak_memory_needs_no_repeats(self, tmp_path):
        def small(metrics, record):
            metrics["memory/peak_allocated_gib"] = {str(step): 0.3 for step in range(1, 11)}

        peaks = 'peak_ratio(lora["memory/peak_allocated_gib"], full["memory/peak_allocated_gib"]) < 0.7'
        pair = make_pair(repeats=1, checks=(peaks,))
        check = judged(tmp_path, every("lora", small), pair, full=[0.1], lora=[0.1]).checks[0]
        assert check.state == "PASS"
        # 154 of 256 blocks of 2 MiB: 0.3 GiB is 153.6 of them.
        assert float(check.value) == pytest.approx(154 / 256)

    def test_checks_without_a_pair_form_work_too(self, tmp_path):
        text = 'max(lora["memory/peak_allocated_gib"]) < max(full["memory/peak_allocated_gib"])'
        verdict = judged(tmp_path, pair=make_pair(checks=(text,)))
        assert (verdict.state, verdict.checks[0].limit) == ("FAIL", None)


def test_planted_faults_are_noted(tmp_path):
    pair = make_pair(faults=(Difference("debug.faults.slow_step", 1.0, 3.0),))
    assert judged(tmp_path, pair=pair).notes == ["planted fault: debug.faults.slow_step (1.0 and 3.0)"]


FAST = {"taken": True, "reason": "", "required": False}
PACKED = {"taken": False, "reason": "sequence_packing is on", "required": False}


class TestPaths:
    def notes(self, tmp_path: Path, full: dict[str, Any] | None, lora: dict[str, Any] | None) -> list[str]:
        paths = {"full": full, "lora": lora}
        return judged(tmp_path, lambda arm, repeat: record(fast_path=paths[arm])).notes

    def test_a_fast_arm_against_a_slow_one_is_noted(self, tmp_path):
        assert self.notes(tmp_path, PACKED, FAST) == [
            "lora took the fast path, full did not (sequence_packing is on): part of what the arms differ by "
            "is the path"
        ]

    @pytest.mark.parametrize("other", [FAST, None])
    def test_arms_of_one_path_or_of_another_trainer_are_not(self, tmp_path, other):
        assert self.notes(tmp_path, other, FAST) == []

    def test_one_repeat_of_several_is_enough(self, tmp_path):
        harm = only("full", 2, record(fast_path=PACKED))
        both = judged(tmp_path, lambda *run: harm(*run) or record(fast_path=FAST))
        assert [note.partition(":")[0] for note in both.notes] == [
            "full, lora took the fast path, full did not (sequence_packing is on)"
        ]
