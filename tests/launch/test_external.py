# SPDX-License-Identifier: Apache-2.0
"""Commands of another trainer: what they leave becomes a run, and nothing else does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_suite.config import ConfigError
from lora_suite.judge.invariants import REQUIRED_INVARIANTS
from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import RunVerdict
from lora_suite.launch.external import leftovers, refuse_leftovers
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.record import Ended, RunRecord
from lora_suite.plan.external.dialect import load_dialect
from lora_suite.plan.model import DeclaredCheck, ExternalCase, Plan, PlannedRun
from tests.launch.helpers import alive
from tests.launch.importers.event_samples import scalar, version, write_events

STEPS = 3
WRITE = "mkdir -p out && cp ../metrics.json out/metrics.json\n"
PLANNED = PlannedRun(case="theirs", repeat=1, pair=None, arm=None)


def metrics(**changes: Any) -> dict[str, Any]:
    """What a trainer of the common shape writes in three steps."""
    found = {
        "train/loss": {"1": 3.0, "2": 2.0, "3": 1.0},
        "train/global_valid_toks": {"1": 100, "2": 1234567, "3": 110},
        "timing/train/total_step_time": {"1": 2.0, "2": 1.0, "3": 6.0},
        "timing/train/checkpointing": {"3": 4.0},
    }
    return {name: value for name, value in (found | changes).items() if value is not None}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ExternalCase]:
    """A case whose command is a shell script; it finds a metrics.json beside its folder."""
    cwd = tmp_path / "their repository"
    cwd.mkdir()

    def build(body: str = WRITE, written: dict[str, Any] | None = None, **changes: Any) -> ExternalCase:
        (cwd / "train.sh").write_text(body)
        (tmp_path / "metrics.json").write_text(json.dumps(metrics() if written is None else written))
        settings: dict[str, Any] = {
            "stem": "theirs",
            "tree": {"facts": {"model": "m"}},
            "overrides": (),
            "steps": STEPS,
            "minutes": 1.0,
            "checks": (DeclaredCheck('data["train/loss"]["3"] < 2', line=7, file=Path("train.sh")),),
            "command": ("bash", "train.sh"),
            "cwd": cwd,
            "outputs": (Path("out"),),
            "metrics": Path("out/metrics.json"),
            "dialect": load_dialect("common", tmp_path / "suite.yaml"),
            "facts": {"model": "m", "lora": True},
            "recipe_tree": None,
            "processes": 1,
            "source": cwd / "train.sh",
        }
        return ExternalCase(**settings | changes)

    return build


@pytest.fixture
def run(tmp_path: Path) -> Callable[[ExternalCase], tuple[Ended, RunVerdict]]:
    """Run a case, and judge what it left."""

    def start(case: ExternalCase) -> tuple[Ended, RunVerdict]:
        run_dir = tmp_path / "run"
        ended = LocalLauncher().run(case, PLANNED, run_dir, keep=False, poll=lambda progress, line: None)
        return ended, judge_run(case, PLANNED, run_dir, ended)

    return start


def record(tmp_path: Path) -> RunRecord:
    return RunRecord.read(tmp_path / "run" / "run.json")


def test_outputs_are_moved_and_read(make, run, tmp_path) -> None:
    case = make()
    ended, verdict = run(case)
    assert (ended.how, ended.status, verdict.state) == ("done", 0, "PASS")
    assert not (case.cwd / "out").exists()
    assert (tmp_path / "run" / "outputs" / "out" / "metrics.json").is_file()
    said = record(tmp_path)
    assert (said.case, said.steps_done, said.dialect) == ("theirs", 3, "common")
    assert said.batches == {"1": "tokens:100", "2": "tokens:1234567", "3": "tokens:110"}
    assert said.recipe == case.tree
    assert [check.state for check in verdict.checks] == ["PASS"]
    assert verdict.checks[0].source == "train.sh:7"


def test_step_time_is_derived(make, run, tmp_path) -> None:
    run(make())
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["timing/train/step_time"] == {"1": 2.0, "2": 1.0, "3": 2.0}


def test_invariants_of_an_external_run_are_printed_as_not_measured(make, run) -> None:
    _, verdict = run(make())
    assert verdict.not_judged == ["LoRA invariants (not measured in an external run)"]


def test_invariants_that_a_hook_recorded_are_judged(make, run) -> None:
    content = {
        "schema_version": 1,
        "invariants": [
            {"name": "frozen_unchanged", "ok": False, "message": "1 of 3 tensors changed"},
            {"name": "adapters_moved", "ok": True, "message": "all"},
            {"name": "replicas_equal", "ok": None, "message": "one rank"},
        ],
    }
    body = f"{WRITE}echo '{json.dumps(content)}' > \"$LORA_SUITE_RUN_DIR/lora_invariants.json\"\n"
    _, verdict = run(make(body))
    states = {check.name: check.state for check in verdict.checks if check.kind == "invariant"}
    assert states == {"frozen_unchanged": "FAIL", "adapters_moved": "PASS"}
    assert "replicas_equal (not measured: one rank)" in verdict.not_judged
    assert "trainable_params (not measured in an external run)" in verdict.not_judged
    # Every other invariant is named as one that was not measured.
    assert len(verdict.not_judged) == len(REQUIRED_INVARIANTS) - 2


def test_command_gets_its_own_folder_environment_and_words(make, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("THEIR_SETTING", "x y")
    body = f'{WRITE}pwd; echo "$THEIR_SETTING"; printf "%s|" "$@"; echo "$LORA_SUITE_RUN_ID" >&2\n'
    case = make(body, overrides=("a=[1, 2]", "--slow=3"))
    run(case)
    log = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert log == [str(case.cwd), "x y", f"a=[1, 2]|--slow=3|{record(tmp_path).run_id}"]


def test_already_done_is_an_error_and_no_repeat(make, run) -> None:
    ended, verdict = run(make("echo target step reached, skipping run\nexit 0\n"))
    assert (ended.how, ended.status) == ("failed", 0)
    assert verdict.state == "ERROR"
    assert "left no new outputs (out); did it find its work already done?" in verdict.message
    assert "target step reached" in verdict.message


def test_outputs_of_an_earlier_run_are_refused_before_anything_runs(make, run, tmp_path) -> None:
    case = make(f"touch ran\n{WRITE}")
    (case.cwd / "out").mkdir()
    plan = Plan(
        suite="s", path=Path("s.yaml"), cases={"theirs": case}, pairs=(), runs=(), budget_gpu_hours=None
    )
    with pytest.raises(ConfigError, match=r"(?s)move these away first:\n.*/out \(case theirs\)"):
        refuse_leftovers(plan)
    _, verdict = run(case)
    assert verdict.state == "ERROR"
    assert "outputs are there before the run" in verdict.message
    assert not (case.cwd / "ran").exists()
    assert (case.cwd / "out").is_dir()


def test_a_broken_symlink_is_a_leftover(make, tmp_path) -> None:
    case = make()
    (case.cwd / "out").symlink_to(tmp_path / "nowhere")
    assert leftovers(case) == [case.cwd / "out"]


@pytest.mark.parametrize(
    "body", ["ln -s ../elsewhere out\n", 'mkdir out && ln -s "$PWD/../metrics.json" out/metrics.json\n']
)
def test_a_symlink_out_of_the_folder_is_never_followed(make, run, tmp_path, body: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "metrics.json").write_text(json.dumps(metrics()))
    _, verdict = run(make(body))
    assert verdict.state == "ERROR"
    assert "by a symlink" in verdict.message
    assert (tmp_path / "elsewhere" / "metrics.json").is_file()


def test_exit_status_counts_even_when_metrics_look_fine(make, run) -> None:
    ended, verdict = run(make(f"{WRITE}echo last words\nexit 7\n"))
    assert (ended.how, ended.status, verdict.state) == ("done", 7, "ERROR")
    assert "everything holds, but the command ended with status 7" in verdict.message
    assert "last words" in verdict.message


def test_checks_are_judged_again_although_the_script_skipped_them(make, run) -> None:
    slow = metrics(**{"train/loss": {"1": 3.0, "2": 3.0, "3": 3.0}})
    ended, verdict = run(make(written=slow))
    assert (ended.status, verdict.state) == (0, "FAIL")
    # A script that checked and failed says the same.
    assert verdict.own_state == "PASS"


def test_a_failed_check_of_theirs_agrees_with_ours(make, run, tmp_path) -> None:
    slow = metrics(**{"train/loss": {"1": 3.0, "2": 3.0, "3": 3.0}})
    ended, verdict = run(make(f"{WRITE}exit 1\n", slow))
    assert (ended.how, ended.status, verdict.own_state, verdict.state) == ("done", 1, "PASS", "FAIL")


def test_checks_that_only_the_script_can_make_are_listed(make, run) -> None:
    _, verdict = run(make(left=("x > 1 (train.sh:9 reads other.json)",)))
    assert "x > 1 (train.sh:9 reads other.json)" in verdict.not_judged


def test_a_short_run_is_missing(make, run) -> None:
    _, verdict = run(make(written=metrics(**{"train/loss": {"1": 3.0, "2": 1.0}})))
    assert (verdict.state, verdict.message) == ("MISSING", "reached 2 of 3 steps")


def test_a_crash_is_named_by_its_last_lines(make, run, tmp_path) -> None:
    ended, verdict = run(make("echo step 1\necho 'RuntimeError: boom' >&2\nexit 1\n"))
    assert (ended.how, verdict.state) == ("failed", "ERROR")
    assert verdict.message.startswith("crashed: RuntimeError: boom")
    assert record(tmp_path).ended == ended


def test_a_crash_after_some_steps_keeps_what_was_measured(make, run) -> None:
    short = metrics(**{"train/loss": {"1": 3.0, "2": 1.0}})
    ended, verdict = run(make(f"{WRITE}echo 'CUDA out of memory'\nexit 1\n", short))
    assert (ended.how, verdict.state, verdict.steps_done) == ("oom", "ERROR", 2)


def test_a_missing_program_is_an_error(make, run) -> None:
    ended, verdict = run(make(command=("no-such-program-here",)))
    assert (ended.status, verdict.state) == (127, "ERROR")
    assert "cannot start no-such-program-here" in verdict.message


def test_non_finite_values_are_recorded_and_fail(make, run, tmp_path) -> None:
    body = "mkdir out; sed 's/2.0/NaN/' ../metrics.json > out/metrics.json\n"
    _, verdict = run(make(body))
    assert record(tmp_path).nonfinite["train/loss"] == [2]
    assert verdict.state == "FAIL"
    assert any(
        check.name == "train/loss" and "not finite at step 2" in check.message for check in verdict.checks
    )


def test_damaged_metrics_are_an_error(make, run) -> None:
    _, verdict = run(make("mkdir out; echo '{' > out/metrics.json\n"))
    assert verdict.state == "ERROR"
    assert "metrics.json: not JSON" in verdict.message


def test_minutes_are_enforced_and_background_children_end(make, run, tmp_path) -> None:
    body = f"{WRITE}(setsid sleep 100 & echo $! > ../child)\nsleep 100\n"
    started = time.monotonic()
    ended, verdict = run(make(body, minutes=0.02))
    assert time.monotonic() - started < 20
    assert (ended.how, verdict.state) == ("timeout", "ERROR")
    assert "ran longer than 0.02 minutes, after step 3 of 3" in ended.message
    assert not alive(int((tmp_path / "child").read_text()))
    assert not (tmp_path / "their repository" / "out").exists()


def test_children_that_a_script_leaves_behind_end_with_it(make, run, tmp_path) -> None:
    ended, verdict = run(make(f"{WRITE}setsid sleep 100 & echo $! > ../child\n"))
    assert (ended.how, verdict.state) == ("done", "PASS")
    assert not alive(int((tmp_path / "child").read_text()))


def test_an_interrupt_ends_the_run_and_leaves_the_folder_as_it_was(make, tmp_path) -> None:
    case = make(f"{WRITE}sleep 100\n")

    def press_ctrl_c(progress: object, line: str) -> None:
        if (case.cwd / "out" / "metrics.json").exists():
            raise KeyboardInterrupt

    run_dir = tmp_path / "run"
    ended = LocalLauncher().run(case, PLANNED, run_dir, keep=False, poll=press_ctrl_c)
    assert (ended.how, ended.message) == ("interrupted", "interrupted, after step 3 of 3")
    assert not (case.cwd / "out").exists()
    assert judge_run(case, PLANNED, run_dir, ended).state == "MISSING"


def test_a_signal_is_named(make, run) -> None:
    ended, verdict = run(make("kill -9 $$\n"))
    assert (ended.how, ended.status, verdict.state) == ("killed", 137, "ERROR")


def test_jsonl_with_names_of_its_own(make, run, tmp_path) -> None:
    lines = "\\n".join(json.dumps({"step": s, "loss": 4.0 / s, "iteration_time": 0.5}) for s in (1, 2, 3))
    case = make(
        f"mkdir out; printf '{lines}\\n' > out/log.jsonl\n",
        metrics=Path("out/log.jsonl"),
        dialect=load_dialect("jsonl", tmp_path / "s.yaml"),
    )
    _, verdict = run(case)
    assert verdict.state == "PASS"
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["train/loss"] == found["loss"] == {"1": 4.0, "2": 2.0, "3": pytest.approx(4 / 3)}
    assert found["timing/train/step_time"] == {"1": 0.5, "2": 0.5, "3": 0.5}
    assert record(tmp_path).batches == {}


def test_event_files_with_names_of_their_own(make, run, tmp_path) -> None:
    events = [
        scalar(float(step), step, tag, value)
        for step in (1, 2, 3)
        for tag, value in (("Loss/train", 4.0 / step), ("iteration-time", 0.5))
    ]
    write_events(tmp_path / "events.out.tfevents.1", version(0.0), *events)
    case = make(
        "mkdir -p out/tb && cp ../events.out.tfevents.1 out/tb/\n",
        metrics=Path("out/tb"),
        dialect=load_dialect("tensorboard", tmp_path / "s.yaml"),
    )
    _, verdict = run(case)
    assert verdict.state == "PASS"
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["train/loss"]["2"] == 2.0
    assert found["timing/train/step_time"] == {"1": 0.5, "2": 0.5, "3": 0.5}


def test_a_logging_interval_is_no_hole(make, run) -> None:
    every_tenth = {str(step): 5.0 / step for step in (1, 10, 20, 30, 40, 50)}
    check = DeclaredCheck('data["train/loss"]["50"] < 1', line=1, file=Path("a.sh"))
    found = {"train/loss": every_tenth}
    _, verdict = run(make(written=found, steps=50, checks=(check,)))
    assert verdict.state == "PASS"


def test_a_hole_in_a_logging_interval_is_missing(make, run) -> None:
    found = {"train/loss": {str(step): 1.0 for step in (1, 10, 20, 40, 50, 60)}}
    _, verdict = run(make(written=found, steps=60, checks=()))
    assert verdict.state == "MISSING"
