# SPDX-License-Identifier: Apache-2.0
"""Which runs are meant by the paths that `lora-suite explain` is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lora_suite.campaign.explain import explain_paths
from lora_suite.cli import main
from lora_suite.config.errors import ConfigError
from lora_suite.judge.verdict import PairVerdict, RunVerdict, SuiteVerdict
from lora_suite.launch.record import RunDir
from lora_suite.launch.traces import Profile, Timed
from tests.judge.helpers import FULL, LORA, make_case, per_step, write_run

STEPS = 23


def make_run(folder: Path, stem: str, repeat: int, optimizer: float) -> Path:
    """A run whose optimizer takes that long and all else 0.1 s."""

    def phases(metrics: dict[str, Any], record: dict[str, Any]) -> None:
        metrics["timing/train/forward_backward"] = per_step(lambda step: 0.1, STEPS)
        metrics["timing/train/optimizer"] = per_step(lambda step: optimizer, STEPS)
        metrics["timing/train/step_time"] = per_step(lambda step: 0.1 + optimizer, STEPS)

    return write_run(folder, make_case(stem), repeat, steps=STEPS, damage=phases)


def make_suite(
    folder: Path, optimizers: dict[str, list[float]], states: dict[str, Any] | None = None
) -> Path:
    """A run of a suite of these cases, with the time that each repeat's optimizer takes."""
    runs = []
    for stem, times in optimizers.items():
        for repeat, optimizer in enumerate(times, 1):
            directory = make_run(folder / stem / str(repeat), stem, repeat, optimizer)
            state = (states or {}).get(f"{stem}/{repeat}", "PASS")
            runs.append(
                RunVerdict(
                    case=stem,
                    repeat=repeat,
                    pair="fsdp2",
                    arm="lora" if stem == LORA else "full",
                    state=state,
                    own_state=state,
                    directory=str(directory),
                    steps_planned=STEPS,
                    summary={"median_step_time": 0.1 + optimizer},
                )
            )
    verdict = SuiteVerdict(
        suite="smoke",
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        directory=str(folder),
        runs=runs,
        pairs=[PairVerdict(name="fsdp2", arms={"full": FULL, "lora": LORA}, state="PASS")],
    )
    (folder / "verdict.json").write_text(verdict.model_dump_json())
    return folder


def test_two_runs(tmp_path: Path) -> None:
    left, right = make_run(tmp_path / "a", LORA, 1, 0.05), make_run(tmp_path / "b", LORA, 1, 0.08)
    found = explain_paths(left, right)
    assert (found.left.name, found.right.directories) == (LORA, [str(right)])
    assert found.matched
    assert found.phases[0].phase == "optimizer"
    assert found.step.delta == pytest.approx(0.03)


def test_a_case_of_two_runs_of_a_suite_with_all_repeats(tmp_path: Path) -> None:
    left = make_suite(tmp_path / "a", {FULL: [0.2, 0.2], LORA: [0.05, 0.051, 0.049]})
    right = make_suite(tmp_path / "b", {FULL: [0.2, 0.2], LORA: [0.08, 0.081, 0.079]})
    found = explain_paths(left, right, LORA)
    assert len(found.left.directories) == 3
    assert found.step.delta == pytest.approx(0.03)
    assert found.step.low == pytest.approx(0.03, abs=1e-9)  # each repeat is 0.03 s slower than its partner
    # A run and a run of a suite may be mixed.
    assert explain_paths(left / LORA / "1", right, LORA).step.delta == pytest.approx(0.03)


def test_the_name_of_a_case_means_that_case_though_others_begin_with_it(tmp_path: Path) -> None:
    left = make_suite(tmp_path / "a", {FULL: [0.2], LORA: [0.05]})
    assert FULL in LORA
    assert explain_paths(left, left, FULL).left.name == FULL


def test_the_arms_of_a_pair(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "a", {FULL: [0.2, 0.2], LORA: [0.05, 0.05]})
    for select in ("fsdp2", None):
        found = explain_paths(suite, None, select)
        assert (found.left.name, found.right.name) == ("full", "lora")
        assert found.step.delta == pytest.approx(-0.15)


def test_a_suite_that_was_moved_is_found(tmp_path: Path) -> None:
    make_suite(tmp_path / "a", {FULL: [0.2], LORA: [0.05]})
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert explain_paths(tmp_path / "b", None).left.directories == [str(tmp_path / "b" / FULL / "1")]


def test_runs_that_were_not_measured_are_no_repeats(tmp_path: Path) -> None:
    states = {f"{LORA}/1": "ERROR", f"{LORA}/3": "MISSING", f"{LORA}/2": "FAIL"}
    suite = make_suite(tmp_path / "a", {FULL: [0.2], LORA: [0.9, 0.05, 0.9]}, states)
    found = explain_paths(suite, None)
    assert found.right.directories == [str(suite / LORA / "2")]
    nothing = make_suite(tmp_path / "b", {FULL: [0.2], LORA: [0.9]}, {f"{LORA}/1": "ERROR"})
    with pytest.raises(ConfigError, match=f"no run of {LORA} was measured"):
        explain_paths(nothing, None)


def profile(microseconds: float) -> Profile:
    row = Timed(kind="kernel", name="gemm", phase="optimizer", count=1, device_us=microseconds, host_us=0.0)
    return Profile(steps=1, timed=[row])


def test_kernels_are_those_of_the_repeat_in_the_middle(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "a", {FULL: [0.2, 0.9, 0.3], LORA: [0.05, 0.05, 0.05]})
    for repeat, microseconds in ((1, 10.0), (2, 20.0), (3, 30.0)):
        for stem in (FULL, LORA):
            files = RunDir(suite / stem / str(repeat))
            files.kernels.parent.mkdir()
            profile(microseconds).write(files.kernels)
    (row,) = explain_paths(suite, None).kernels
    assert row.left_us == 30.0


TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "theirs", "ts": 0, "dur": 5, "pid": 0, "tid": 0},
    ]
}


def test_traces_of_other_trainers_are_found_or_named(tmp_path: Path) -> None:
    left, right = make_run(tmp_path / "a", LORA, 1, 0.05), make_run(tmp_path / "b", LORA, 1, 0.08)
    (left / "tb").mkdir()
    (left / "tb" / "host_1.123.pt.trace.json").write_text(json.dumps(TRACE))
    named = tmp_path / "mine.json"
    named.write_text(json.dumps(TRACE))
    assert [row.name for row in explain_paths(left, right, right_trace=named).kernels] == ["theirs"]
    assert explain_paths(left, right).kernels == []


def test_metrics_of_another_trainer_need_no_record(tmp_path: Path) -> None:
    for name, timed in (("a", per_step(lambda step: 1.0, STEPS)), ("b", per_step(lambda step: 1.2, STEPS))):
        (tmp_path / name).mkdir()
        metrics = {
            "train/loss": per_step(lambda step: 2.0, STEPS),
            "timing/train/total_step_time": timed,
        }
        (tmp_path / name / "metrics.json").write_text(json.dumps(metrics))
    found = explain_paths(tmp_path / "a", tmp_path / "b")
    assert (found.left.name, found.right.name) == ("a", "b")
    assert found.step.delta == pytest.approx(0.2)
    assert [part.phase for part in found.phases] == ["other"]
    assert not found.matched


def test_wrong_input_is_named(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "a", {FULL: [0.2], LORA: [0.05]})
    run = suite / LORA / "1"
    wrong: list[tuple[tuple[Path, Path | None], str | None, str]] = [
        ((tmp_path / "none", run), None, "neither a run .* nor a run of a suite"),
        ((run, None), None, "name the folder of one run of a suite"),
        ((suite, suite), None, "several cases; choose one of"),
        ((suite, suite), "fsdp2", "matches sft-.*choose one of"),
        ((suite, suite), "megatron", "matches none"),
        ((suite, None), "megatron", "choose one pair with -k"),
    ]
    for (left, right), select, said in wrong:
        with pytest.raises(ConfigError, match=said):
            explain_paths(left, right, select)
    (suite / "verdict.json").write_text('{"suite": 3}')
    with pytest.raises(ConfigError, match="not a verdict"):
        explain_paths(suite, None)
    (run / "metrics.json").write_text("{")
    with pytest.raises(ConfigError, match=r"metrics\.json"):
        explain_paths(run, run)
    (run / "metrics.json").write_text('{"train/loss": {"1": 2.0}}')
    with pytest.raises(ConfigError, match=r"nothing to compare: .*step_time"):
        explain_paths(run, run)


def test_a_pair_of_three_arms_wants_two_runs_named(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "a", {FULL: [0.2], LORA: [0.05]})
    verdict = json.loads((suite / "verdict.json").read_text())
    verdict["pairs"][0]["arms"]["third"] = FULL
    (suite / "verdict.json").write_text(json.dumps(verdict))
    with pytest.raises(ConfigError, match="3 arms"):
        explain_paths(suite, None)


def test_the_command_prints_tables_or_json(tmp_path: Path) -> None:
    left, right = make_run(tmp_path / "a", LORA, 1, 0.05), make_run(tmp_path / "b", LORA, 1, 0.08)
    words = ["explain", str(left), str(right)]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0
    assert shown.output.startswith("optimizer +0.0300 s, 100 % of the slowdown\n")
    printed = CliRunner().invoke(main, [*words, "--json"])
    assert json.loads(printed.output)["phases"][0]["phase"] == "optimizer"
    wrong = CliRunner().invoke(main, ["explain", str(tmp_path), str(right)])
    assert wrong.exit_code == 2
    assert "neither a run" in wrong.output
