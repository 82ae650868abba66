# SPDX-License-Identifier: Apache-2.0
"""Two runs or suite runs against each other, on folders that a launcher wrote without training."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from lora_suite.campaign.compare import compare_paths
from lora_suite.cli import main
from lora_suite.config.errors import ConfigError
from lora_suite.plan.metric_names import LOSS, STEP_TIME
from tests.campaign.helpers import train
from tests.history.folders import suite_run
from tests.judge.helpers import FULL, LORA, make_case, write_run


def phased(metrics, record, damage=None):
    """Phases of every step: all but 50 ms of it is the optimizer."""
    times = metrics["timing/train/step_time"]
    metrics["timing/train/forward_backward"] = dict.fromkeys(times, 0.05)
    metrics["timing/train/optimizer"] = {step: value - 0.05 for step, value in times.items()}
    if damage is not None:
        damage(metrics, record)


def paced(lora=0.07, full=0.1, jitter=0.001, damage=None):
    """Deeds of all runs: both arms' step times scatter by `jitter` and share each repeat's level."""

    def deed(case, planned, run_dir):
        level = 1 + 0.01 * planned.repeat
        own = 1 + jitter * (planned.repeat % 2 - 0.5) * (1 if case.lora else -1)
        step_time = (lora if case.lora else full) * level * own
        return train(
            case, planned, run_dir, step_time=step_time, damage=lambda *files: phased(*files, damage)
        )

    return {(case, repeat): deed for case in (LORA, FULL) for repeat in range(1, 5)}


def on_gpu(metrics, record):
    """A run on a GPU."""
    record["environment"]["strict"] |= {"device": "NVIDIA H200", "cuda": "12.8"}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A suite run to compare with."""
    return suite_run(tmp_path_factory.mktemp("before"), paced())


def cases(comparison):
    """Cases of a comparison by name."""
    return {case.case: case for case in comparison.cases}


def test_equal_suite_runs_pass_but_for_what_scatter_hides(before, tmp_path):
    found = compare_paths(before, suite_run(tmp_path, paced()))
    lora = cases(found)[LORA]
    assert lora.loss is not None
    assert (lora.loss.tier, lora.loss.state) == ("exact", "PASS")
    time, memory = lora.figures
    assert time.effect is not None
    assert time.effect.estimate == pytest.approx(1.0)
    # Repeats drift by 1 %: the arm alone cannot be resolved to 1 %, and that is said.
    assert time.state == "INCONCLUSIVE"
    assert memory.state is None
    assert found.exit_code == 5


def test_only_the_lora_arm_moved(before, tmp_path):
    found = compare_paths(before, suite_run(tmp_path, paced(lora=0.084)))
    (pair,) = found.pairs
    assert pair.attribution is not None
    assert pair.attribution.moved == "lora-only"
    assert pair.attribution.double_ratio is not None
    assert pair.attribution.double_ratio.estimate == pytest.approx(1.2)
    assert (pair.state, cases(found)[LORA].state, found.exit_code) == ("FAIL", "FAIL", 1)
    phases = {phase.phase: phase.delta for phase in pair.attribution.phases}
    assert phases["forward_backward"] == pytest.approx(0.0)
    assert phases["optimizer"] == pytest.approx(0.014 * 1.025, rel=0.01)
    assert phases["other"] == pytest.approx(0.0, abs=1e-6)


def test_both_arms_moved_alike(before, tmp_path):
    (pair,) = compare_paths(before, suite_run(tmp_path, paced(lora=0.084, full=0.12))).pairs
    assert pair.attribution is not None
    assert (pair.attribution.moved, pair.state) == ("shared", "FAIL")


def test_a_faster_full_arm_is_no_regression(before, tmp_path):
    found = compare_paths(before, suite_run(tmp_path, paced(full=0.08)))
    (pair,) = found.pairs
    assert pair.attribution is not None
    assert (pair.attribution.moved, pair.state) == ("full-only", "PASS")
    assert cases(found)[FULL].state == "PASS"


@pytest.mark.parametrize("lenient", [False, True])
def test_another_strict_environment_is_not_compared_unless_asked_for(before, tmp_path, lenient):
    found = compare_paths(before, suite_run(tmp_path, paced(lora=0.084, damage=on_gpu)), lenient=lenient)
    lora = cases(found)[LORA]
    assert lora.differing[0].startswith("environment device: None and NVIDIA H200")
    assert lora.own_state == ("PASS" if lenient else "INCOMPARABLE")
    assert bool(lora.figures) is lenient
    assert found.exit_code == (1 if lenient else 5)


def test_another_recipe_is_not_compared(tmp_path):
    left = write_run(tmp_path / "full", make_case(FULL))
    right = write_run(tmp_path / "lora", make_case(LORA))
    (case,) = compare_paths(left, right).cases
    assert (case.case, case.state) == (f"{FULL} and {LORA}", "INCOMPARABLE")
    assert any("lora_cfg.enabled: False and True" in each for each in case.differing)


def test_a_planted_fault_is_told_and_compared(tmp_path):
    def planted(metrics, record):
        record["recipe"]["debug"]["faults"]["slow_step"] = 1.2

    left = write_run(tmp_path / "left", make_case(LORA))
    right = write_run(tmp_path / "right", make_case(LORA), damage=planted)
    (case,) = compare_paths(left, right).cases
    assert case.differing == ["planted fault debug.faults.slow_step: '(absent)' and 1.2"]
    assert case.own_state == "PASS"


def test_memory_of_a_gpu_needs_no_repeats(tmp_path):
    def grown(metrics, record):
        on_gpu(metrics, record)
        metrics["memory/peak_allocated_gib"] = {str(step): 0.6 for step in range(1, 11)}

    left = write_run(tmp_path / "left", make_case(), damage=on_gpu)
    right = write_run(tmp_path / "right", make_case(), damage=grown)
    (case,) = compare_paths(left, right).cases
    time, memory = case.figures
    assert (time.metric, time.state) == (STEP_TIME, "INCONCLUSIVE")
    assert memory.state == "FAIL"
    assert "+51 blocks of 2 MiB" in memory.message


@pytest.mark.parametrize(
    ("factor", "tier", "state"),
    [(1 + 1e-5, "drift", "PASS"), (1.001, "apart", "FAIL"), (1.05, "apart", "FAIL"), (1.0, "exact", "PASS")],
)
def test_the_loss_has_its_tier(tmp_path, factor, tier, state):
    def moved(metrics, record):
        metrics[LOSS] = {step: value * factor for step, value in metrics[LOSS].items()}

    left = write_run(tmp_path / "left", make_case())
    right = write_run(tmp_path / "right", make_case(), damage=moved)
    (case,) = compare_paths(left, right).cases
    assert case.loss is not None
    assert (case.loss.tier, case.loss.state) == (tier, state)


def test_a_loss_that_is_not_finite_is_apart(tmp_path):
    def broken(metrics, record):
        metrics[LOSS]["7"] = None

    left = write_run(tmp_path / "left", make_case())
    right = write_run(tmp_path / "right", make_case(), damage=broken)
    (case,) = compare_paths(left, right).cases
    assert case.loss is not None
    assert case.loss.state == "FAIL"


def test_other_batches_are_compared_by_level_alone(tmp_path):
    def shuffled(metrics, record):
        record["batches"] = {step: f"other-{step}" for step in record["batches"]}

    left = write_run(tmp_path / "left", make_case())
    right = write_run(tmp_path / "right", make_case(), damage=shuffled)
    (case,) = compare_paths(left, right).cases
    assert case.loss is not None
    assert (case.loss.tier, case.loss.state) == ("statistical", "INCONCLUSIVE")


def test_a_case_of_one_side_is_missing(before, tmp_path):
    folder = suite_run(tmp_path, paced())
    verdict = json.loads((folder / "verdict.json").read_text())
    verdict["runs"] = [run for run in verdict["runs"] if run["case"] != LORA]
    (folder / "verdict.json").write_text(json.dumps(verdict))
    found = compare_paths(before, folder)
    assert cases(found)[LORA].state == "MISSING"
    assert cases(found)[LORA].message == "not measured on the right"
    assert found.pairs[0].state == "INCOMPARABLE"
    assert found.exit_code == 4


def test_a_run_is_compared_with_the_suite_run_of_its_case(before):
    found = compare_paths(before, before / LORA / "2")
    assert [case.case for case in found.cases] == [LORA]
    assert len(found.cases[0].figures[0].left) == 4
    assert math.isclose(found.cases[0].figures[0].right[0], found.cases[0].figures[0].left[1])


def test_a_folder_without_a_run_is_refused(before, tmp_path):
    with pytest.raises(ConfigError, match="name a run folder"):
        compare_paths(before, tmp_path)


def test_the_command_prints_and_exits(before, tmp_path):
    slower = suite_run(tmp_path, paced(lora=0.084))
    done = CliRunner().invoke(main, ["compare", str(before), str(slower)])
    assert done.exit_code == 1
    assert f"FAIL {LORA}" in done.output
    assert "only LoRA moved: it is slower" in done.output
    assert done.output.rstrip().endswith("FAIL exit 1")
    done = CliRunner().invoke(main, ["compare", str(before), str(slower), "--json"])
    assert json.loads(done.output)["pairs"][0]["attribution"]["moved"] == "lora-only"
