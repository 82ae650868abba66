# SPDX-License-Identifier: Apache-2.0
"""Figures of a suite run against a baseline's."""

from __future__ import annotations

import math

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.history.baselines import diff_baseline, set_baseline
from lora_suite.history.figures import compare_figure
from lora_suite.history.metrics import PEAK_MEMORY
from lora_suite.history.store import Store
from lora_suite.plan.metric_names import STEP_TIME
from tests.campaign.helpers import slow_lora, train
from tests.history.folders import suite_run
from tests.judge.helpers import FULL, LORA

# Four runs with a spread of 0.1 %.
FOUR = (0.1, 0.1002, 0.0999, 0.1001)


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    with Store(tmp_path / "history.db", create=True) as opened:
        yield opened


@pytest.mark.parametrize(
    ("share", "state"),
    [(1.0, "PASS"), (0.9, "PASS"), (1.007, "PASS"), (1.02, "FAIL"), (1.0095, "INCONCLUSIVE")],
)
def test_a_time_is_judged_on_the_interval_of_its_ratio(share, state):
    figure = compare_figure(STEP_TIME, FOUR, [share * value for value in FOUR], on_gpu=True)
    assert figure.state == state
    assert figure.effect is not None
    assert figure.effect.estimate == pytest.approx(share)
    # Student's two-sample t by hand: t(6, 0.975) = 2.4469.
    logs = [math.log(value) for value in FOUR]
    mean = sum(logs) / 4
    error = math.sqrt(sum((log - mean) ** 2 for log in logs) / 3) * math.sqrt(2 / 4)
    assert figure.effect.high == pytest.approx(share * math.exp(2.4469 * error), rel=1e-5)


def test_scatter_that_hides_a_change_is_inconclusive():
    figure = compare_figure(STEP_TIME, (0.1, 0.12), (0.1, 0.12), on_gpu=True)
    assert figure.state == "INCONCLUSIVE"
    assert "1 % could not be ruled out" in figure.message


def test_one_run_a_side_is_never_decided():
    figure = compare_figure(STEP_TIME, [0.1], [0.2], on_gpu=True)
    assert (figure.state, figure.effect) == ("INCONCLUSIVE", None)
    assert figure.message.startswith("+100.00 %")


def test_memory_of_a_gpu_is_judged_by_blocks_and_a_process_is_not():
    assert compare_figure(PEAK_MEMORY, [12.0], [12.0], on_gpu=True).state == "PASS"
    assert compare_figure(PEAK_MEMORY, [12.0], [12.5], on_gpu=True).state == "FAIL"
    assert compare_figure(PEAK_MEMORY, [12.0], [12.5], on_gpu=False).state is None


def test_a_baseline_holds_what_was_measured_then(store, tmp_path):
    first = suite_run(tmp_path)
    set_baseline(store, "release", first, "as released", "me")
    kept = store.baseline("release")
    assert (kept.why, kept.by, len(kept.session.runs)) == ("as released", "me", 8)
    assert all(run.traces == {} for run in kept.session.runs)
    slower = {
        case.case: case for case in diff_baseline(store, "release", suite_run(tmp_path, slow_lora(2.0)))
    }
    assert slower[LORA].state == "FAIL"
    # The full arm scatters by 1 % and did not move.
    assert slower[FULL].state == "INCONCLUSIVE"


def test_the_last_baseline_of_a_name_counts_and_earlier_ones_stay(store, tmp_path):
    first, second = suite_run(tmp_path), suite_run(tmp_path)
    set_baseline(store, "release", first, "", "me")
    late = set_baseline(store, "release", second, "", "me").model_copy(update={"created": "2100-01-01"})
    store.add(late)
    assert store.baseline("release").session.name == second.name
    assert len(store.baselines()) == 3
    with pytest.raises(ConfigError, match="no baseline 'other'"):
        store.baseline("other")


def test_another_environment_and_another_recipe_are_named(store, tmp_path):
    set_baseline(store, "release", suite_run(tmp_path), "", "me")

    def elsewhere(case, planned, run_dir):
        def damage(metrics, record):
            record["environment"]["strict"]["torch"] = "9.9"

        return train(case, planned, run_dir, damage=damage)

    deeds = {(LORA, repeat): elsewhere for repeat in range(1, 5)}
    found = {case.case: case for case in diff_baseline(store, "release", suite_run(tmp_path, deeds))}
    assert found[LORA].state == "INCOMPARABLE"
    assert found[LORA].message == "another strict environment (torch)"
    assert found[LORA].figures == ()


def test_a_case_that_was_not_measured_is_missing(store, tmp_path):
    set_baseline(store, "release", suite_run(tmp_path), "", "me")

    def breaks(case, planned, run_dir):
        ended = train(case, planned, run_dir)
        return ended.model_copy(update={"how": "oom", "status": 1})

    deeds = {(LORA, repeat): breaks for repeat in range(1, 5)}
    found = {case.case: case for case in diff_baseline(store, "release", suite_run(tmp_path, deeds))}
    assert (found[LORA].state, found[FULL].own_state) == ("MISSING", "PASS")
