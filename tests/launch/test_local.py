# SPDX-License-Identifier: Apache-2.0
"""The local launcher against stand-in drivers: how a run is named, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_suite.config import load_recipe
from lora_suite.launch.local import LocalLauncher
from lora_suite.launch.progress import Progress
from lora_suite.launch.record import Ended, RunDir, RunRecord
from lora_suite.plan.model import Case, PlannedRun
from tests.launch.helpers import alive

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "sft-tiny-llama-1n2c-fsdp2.yaml"

# A rank as torch elastic starts it: in a session of its own. This one also refuses SIGTERM.
STUBBORN_RANK = """
python - <<'PY'
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import signal, time, os
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", os.getpid(), flush=True)
time.sleep(120)
'''], start_new_session=True)
child.wait()
PY
"""


def make_case(tmp_path: Path, body: str, minutes: float = 1.0, overrides: tuple[str, ...] = ()) -> Case:
    driver = tmp_path / "driver.sh"
    driver.write_text(f"#!/usr/bin/env bash\n{body}")
    resolved = load_recipe(RECIPE)
    return Case(
        stem="sft-stub",
        recipe_path=RECIPE,
        driver_path=driver,
        recipe=resolved.recipe,
        tree=resolved.tree,
        overrides=overrides,
        steps=30,
        minutes=minutes,
        checks=(),
    )


def run(case: Case, run_dir: Path, *, keep: bool = False) -> Ended:
    planned = PlannedRun(case=case.stem, repeat=2, pair=None, arm=None)
    return LocalLauncher().run(case, planned, run_dir, keep=keep, poll=lambda progress, line: None)


def rank_pid(run_dir: Path) -> int:
    return int((run_dir / "run.log").read_text().split()[1])


def test_done_run_keeps_its_log_and_gets_what_it_needs(tmp_path: Path) -> None:
    body = 'printf "%s\\n" "$@"; echo "$LORA_SUITE_CASE $LORA_SUITE_KEEP $LORA_SUITE_RUN_DIR"; env >&2\n'
    case = make_case(tmp_path, body, overrides=("a=[1, 2]", "b=c d"))
    run_dir = tmp_path / "run"
    ended = run(case, run_dir, keep=True)
    assert (ended.how, ended.status) == ("done", 0)
    log = (run_dir / "run.log").read_text()
    assert log.startswith(f"a=[1, 2]\nb=c d\nsft-stub 1 {run_dir}\n")
    assert f"PATH={Path(sys.executable).parent}{os.pathsep}" in log
    record = RunRecord.read(run_dir / "run.json")
    assert f"LORA_SUITE_RUN_ID={record.run_id}" in log
    assert (record.case, record.ended) == ("sft-stub", ended)
    assert record.recipe["policy"]["init"] == "random"


def test_run_ids_are_unique(tmp_path: Path) -> None:
    case = make_case(tmp_path, ":")
    for name in ("a", "b"):
        run(case, tmp_path / name)
    first, second = (RunRecord.read(tmp_path / name / "run.json").run_id for name in ("a", "b"))
    assert first != second


def test_record_that_the_training_wrote_is_kept_and_completed(tmp_path: Path) -> None:
    training = {
        "run_id": "ID",
        "case": "x",
        "started": "t",
        "recipe": {},
        "recipe_hash": "h",
        "steps_done": 30,
    }
    body = f"sed s/ID/$LORA_SUITE_RUN_ID/ > $LORA_SUITE_RUN_DIR/run.json <<< '{json.dumps(training)}'\n"
    run(make_case(tmp_path, body), tmp_path / "run")
    record = RunRecord.read(tmp_path / "run" / "run.json")
    assert record.steps_done == 30
    assert record.ended is not None
    assert record.ended.how == "done"


@pytest.mark.parametrize("status", [1, 4, 5])
def test_verdict_of_the_driver_is_believed_only_beside_its_evidence(tmp_path: Path, status: int) -> None:
    ended = run(make_case(tmp_path, f"exit {status}\n"), tmp_path / "no-evidence")
    assert (ended.how, ended.status) == ("failed", status)
    body = f"echo '{{\"status\": {status}}}' > $LORA_SUITE_RUN_DIR/checks.json; exit {status}\n"
    ended = run(make_case(tmp_path, body), tmp_path / "evidence")
    assert (ended.how, ended.status) == ("done", status)


def test_crash_is_named_by_the_rank_that_failed_first(tmp_path: Path) -> None:
    first = {"rank": 1, "step": 7, "message": "ValueError: bad row", "time": 5.0}
    later = {"rank": 0, "step": 7, "message": "RuntimeError: Connection closed by peer", "time": 6.0}
    body = "".join(
        f"echo '{json.dumps(failure)}' > $LORA_SUITE_RUN_DIR/failure.{failure['rank']}.json\n"
        for failure in (first, later)
    )
    ended = run(make_case(tmp_path, body + "echo some line; exit 3\n"), tmp_path / "run")
    assert (ended.how, ended.status, ended.rank, ended.step) == ("failed", 3, 1, 7)
    assert ended.message == "ValueError: bad row"
    assert ended.last_lines == ["some line"]


def test_out_of_memory_is_its_own_kind(tmp_path: Path) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    ended = run(make_case(tmp_path, f"echo '{text}'; exit 3\n"), tmp_path / "run")
    assert ended.how == "oom"
    assert ended.message == text


def test_driver_ended_by_a_signal_is_killed(tmp_path: Path) -> None:
    ended = run(make_case(tmp_path, "kill -9 $$\n"), tmp_path / "run")
    assert (ended.how, ended.status) == ("killed", 137)


@pytest.mark.slow
def test_timeout_leaves_no_process_even_one_that_ignores_sigterm_in_its_own_session(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    case = make_case(tmp_path, STUBBORN_RANK, minutes=2.0 / 60.0)
    start = time.monotonic()
    ended = run(case, run_dir)
    took = time.monotonic() - start
    assert ended.how == "timeout"
    assert "ran longer than 0.0333333 minutes" in ended.message
    assert not alive(rank_pid(run_dir))
    # Two seconds of its own, then ten at most.
    assert took < 12.0
    assert RunRecord.read(RunDir(run_dir).record).ended == ended


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_cleans_up_and_is_returned(tmp_path: Path, number: signal.Signals) -> None:
    """The launching process gets a signal, as from Ctrl-C, a CI cancel, a closed terminal."""
    make_case(tmp_path, STUBBORN_RANK)
    run_dir = tmp_path / "run"
    program = (
        "from pathlib import Path\n"
        "from tests.launch.test_local import make_case, run, STUBBORN_RANK\n"
        f"ended = run(make_case(Path({str(tmp_path)!r}), STUBBORN_RANK), Path({str(run_dir)!r}))\n"
        "print(ended.how)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    log = run_dir / "run.log"
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = rank_pid(run_dir)
    assert alive(pid)
    process.send_signal(number)
    time.sleep(0.3)
    # A second Ctrl-C, while it cleans up, changes nothing.
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert output == "interrupted\n"
    assert not alive(pid)


def test_background_children_of_a_finished_driver_are_ended(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    body = "setsid sleep 100 & echo child $!; disown; exit 0\n"
    assert run(make_case(tmp_path, body), run_dir).how == "done"
    time.sleep(0.1)
    assert not alive(rank_pid(run_dir))


def test_processes_of_other_runs_are_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"], env={**os.environ, "LORA_SUITE_RUN_ID": "sft-stub-2-other"})
    try:
        assert run(make_case(tmp_path, "sleep 60\n", minutes=0.5 / 60.0), tmp_path / "run").how == "timeout"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_poll_sees_progress_and_the_last_line(tmp_path: Path) -> None:
    seen: list[tuple[Progress | None, str]] = []
    progress = '{"step": 4, "steps": 30, "loss": 2.5, "seconds_left": 1.0}'
    body = f"echo '{progress}' > $LORA_SUITE_RUN_DIR/progress.json; printf 'one\\rtwo\\n'; sleep 1\n"
    planned = PlannedRun(case="sft-stub", repeat=1, pair=None, arm=None)
    LocalLauncher().run(
        make_case(tmp_path, body),
        planned,
        tmp_path / "run",
        keep=False,
        poll=lambda progress, line: seen.append((progress, line)),
    )
    assert seen[-1] == (Progress(step=4, steps=30, loss=2.5, seconds_left=1.0), "two")
