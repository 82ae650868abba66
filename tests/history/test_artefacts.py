# SPDX-License-Identifier: Apache-2.0
"""The folder of a suite run, read as facts."""

from __future__ import annotations

import copy
import json
import shutil

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.history.artefacts import read_session, series_name, training_of
from lora_suite.judge.verdict import SuiteVerdict
from lora_suite.plan.metric_names import LOSS, STEP_TIME
from tests.history.folders import suite_run
from tests.judge.helpers import FULL, LORA, RATIO, recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A suite run of a pair, four repeats, LoRA at 0.7 of the time."""
    return suite_run(tmp_path_factory.mktemp("results"))


def test_every_run_and_ratio_is_there(folder):
    fact = read_session(folder)
    assert sorted((run.case, run.repeat) for run in fact.runs) == sorted(
        (case, repeat) for case in (FULL, LORA) for repeat in range(1, 5)
    )
    first = next(run for run in fact.runs if run.case == LORA)
    assert first.values[STEP_TIME] == pytest.approx(0.07, rel=0.02)
    assert first.values[LOSS] == pytest.approx(3.0 * 2.718281828 ** (-1.0))
    assert first.traces[STEP_TIME].steps == list(range(1, 11))
    (pair,) = [pair for pair in fact.pairs if pair.expression == RATIO.removesuffix(" < 0.8")]
    assert len(pair.ratios) == 4
    assert pair.estimate == pytest.approx(0.7, rel=0.02)


def test_environments_have_the_names_that_the_verdict_gives_them(folder):
    verdict = SuiteVerdict.model_validate_json((folder / "verdict.json").read_text())
    fact = read_session(folder)
    assert {run.environment for run in fact.runs} == {run.environment for run in verdict.runs} != {""}
    assert fact.environments.keys() == {run.environment for run in fact.runs}


def test_a_folder_that_was_moved_gives_the_same_fact(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    moved, there = read_session(tmp_path / "elsewhere"), read_session(folder)
    assert moved.id == there.id
    assert moved.runs == there.runs


def test_a_run_that_left_nothing_has_its_state_alone(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "hurt")
    shutil.rmtree(tmp_path / "hurt" / FULL / "2")
    hurt = next(run for run in read_session(tmp_path / "hurt").runs if (run.case, run.repeat) == (FULL, 2))
    assert (hurt.version, hurt.environment, hurt.traces) == ("", "", {})


def test_a_file_of_another_run_is_not_taken_for_this_one(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "mixed")
    record = tmp_path / "mixed" / FULL / "2" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "run_id": "somebody-else"}))
    mixed = next(run for run in read_session(tmp_path / "mixed").runs if (run.case, run.repeat) == (FULL, 2))
    assert mixed.traces == {}


def test_a_damaged_verdict_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"verdict\.json: No such file"):
        read_session(tmp_path)
    (tmp_path / "verdict.json").write_text('{"suite": 3}')
    with pytest.raises(ConfigError, match=r"verdict\.json: is no verdict of a suite run: suite"):
        read_session(tmp_path)


def changed(**keys):
    """The shipped recipe with some dotted keys set."""
    tree = copy.deepcopy(recipe(LORA).tree)
    for key, value in keys.items():
        node = tree
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        node[last] = value
    return tree


def test_names_and_paths_make_no_other_training():
    plain = training_of(recipe(LORA).tree)
    assert training_of(changed(logger__wandb__name="tonight", checkpointing__checkpoint_dir="x")) == plain
    assert training_of(changed(policy__train_global_batch_size=64)) != plain


def test_a_planted_fault_makes_another_training():
    plain = training_of(recipe(LORA).tree)
    assert training_of(changed(debug__faults__slow_step=1.0)) == plain
    assert training_of(changed(debug__faults__slow_step=1.02)) != plain


@pytest.mark.parametrize(
    ("check", "name"),
    [
        ('ratio(a["x"], b["y"]) < 0.8', 'ratio(a["x"], b["y"])'),
        ('0.8 > ratio(a["x"], b["y"])', 'ratio(a["x"], b["y"])'),
        ('ratio(a["x"], b["x"], 2, -1) <= 1', 'ratio(a["x"], b["x"], 2, -1)'),
        ("no expression <", "no expression <"),
    ],
)
def test_a_series_goes_on_when_its_limit_changes(check, name):
    assert series_name(check) == name
