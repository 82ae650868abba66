# SPDX-License-Identifier: Apache-2.0
"""`lora-suite train` with a stand-in for torchrun: what it starts, what it refuses, how it names an end."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_suite.config import load_recipe
from lora_suite.launch.record import RunRecord
from lora_suite.launch.training import train
from tests.launch.helpers import alive

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "sft-tiny-llama-1n2c-fsdp2.yaml"

STAND_IN = """\
import json, os, pathlib, sys
run_dir = pathlib.Path(sys.argv[-1])
(run_dir / "started.json").write_text(json.dumps({"argv": sys.argv, "env": dict(os.environ)}))
BODY
"""

# The form of torch 2.11's and 2.13's torchrun after rank 1 was killed and rank 0 lost its peer.
SUMMARY = """\
step 1/30  loss 5.5
W1130 12:00:00.000000 1234 torch/distributed/elastic/api.py:1010] Sending process 11 closing signal
E1130 12:00:00.000000 1234 torch/distributed/elastic/api.py:984] failed (exitcode: 1)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 10, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
lora_suite.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_12:00:00
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 12
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_12:00:00
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory, with a stand-in torchrun in front of the real one that does nothing yet."""
    for name in ("LORA_SUITE_RUN_ID", "LORA_SUITE_CASE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LORA_SUITE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stand-in"), str(ROOT)]))
    stand_in(tmp_path / "run", "pass")
    return tmp_path / "run"


def stand_in(run_dir: Path, body: str) -> None:
    """Let `python -m torch.distributed.run` do `body`."""
    package = run_dir.parent / "stand-in" / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(STAND_IN.replace("BODY", body))


def record(run_dir: Path) -> RunRecord:
    return RunRecord.read(run_dir / "run.json")


def test_torchrun_gets_the_run_directory_and_the_ranks_their_job(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_SUITE_RUN_ID", "the-id")
    monkeypatch.setenv("LORA_SUITE_CASE", "the-case")
    overrides = ["sft.max_num_steps=7", "+policy.dtensor_cfg.env_vars.SOME_FLAG='a b'"]
    assert train(RECIPE, overrides) == 0
    started = json.loads((run_dir / "started.json").read_text())
    words = ["--standalone", "--nproc-per-node", "2", "-m", "lora_suite.train", str(run_dir)]
    assert started["argv"][1:] == words
    assert started["env"]["SOME_FLAG"] == "a b"
    assert started["env"]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    job = json.loads((run_dir / "recipe.json").read_text())
    assert (job["case"], job["run_id"], job["recipe_path"]) == ("the-case", "the-id", str(RECIPE))
    assert job["tree"] == load_recipe(RECIPE, overrides).tree
    ended = record(run_dir).ended
    assert ended is not None
    assert (ended.how, ended.status) == ("done", 0)


def test_threads_set_by_the_user_stay(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert train(RECIPE, []) == 0
    assert json.loads((run_dir / "started.json").read_text())["env"]["OMP_NUM_THREADS"] == "3"


def test_names_and_folder_default_to_the_recipe(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORA_SUITE_RUN_DIR")
    monkeypatch.chdir(tmp_path)
    assert train(RECIPE, []) == 0
    (default,) = (tmp_path / "results" / "manual").iterdir()
    assert default.name.endswith("-sft-tiny-llama-1n2c-fsdp2")
    assert record(default).case == "sft-tiny-llama-1n2c-fsdp2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.dtensor_cfg.lora_cfg.dimm=16"], "dimm"),
        (["cluster.num_nodes=2"], "--launcher slurm"),
        (["policy.train_global_batch_size=15"], "15"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    run_dir: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert train(RECIPE, overrides) == 2
    assert message in capsys.readouterr().err
    assert not run_dir.exists()


def test_metrics_of_another_run_are_never_taken_over(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.mkdir()
    (run_dir / "metrics.json").write_text("{}")
    assert train(RECIPE, ["checkpointing.enabled=true", "checkpointing.resume=true"]) == 2
    assert "metrics.json of another run" in capsys.readouterr().err
    assert not (run_dir / "started.json").exists()
    # With a checkpoint to continue from it is no other run, but the same one.
    (run_dir / "ckpts" / "step_10").mkdir(parents=True)
    assert train(RECIPE, ["checkpointing.enabled=true", "checkpointing.resume=false"]) == 2
    assert train(RECIPE, ["checkpointing.enabled=false", "checkpointing.resume=true"]) == 2
    assert train(RECIPE, ["checkpointing.enabled=true", "checkpointing.resume=true"]) == 0


def test_output_passes_through_as_it_comes(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in(run_dir, "print('out'); print('50 %\\r100 %', end='', file=sys.stderr)")
    assert train(RECIPE, []) == 0
    out = capfd.readouterr().out
    assert "out\n" in out
    assert "50 %\r100 %" in out


def test_killed_rank_is_named_although_torchrun_blames_its_peer(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"rank": 0, "step": 5, "message": "RuntimeError: Connection closed by peer", "time": 1.0}
    progress = {"step": 4, "steps": 30, "loss": 1.0, "seconds_left": 1.0}
    stand_in(
        run_dir,
        f"(run_dir / 'failure.0.json').write_text('''{json.dumps(failure)}''')\n"
        f"(run_dir / 'progress.json').write_text('''{json.dumps(progress)}''')\n"
        # One line at a time, as torchrun's output comes.
        f"[print(line, flush=True) for line in '''{SUMMARY}'''.splitlines()]; sys.exit(1)",
    )
    assert train(RECIPE, []) == 3
    ended = record(run_dir).ended
    assert ended is not None
    # Step 4 is done, so the rank died in step 5.
    assert (ended.how, ended.status, ended.rank, ended.step) == ("killed", 3, 1, 5)
    assert "SIGKILL" in ended.message
    assert ended.last_lines == ["step 1/30  loss 5.5"]
    assert "error: rank 1, step 5: ended by SIGKILL" in capsys.readouterr().err


def test_rank_that_fails_by_itself_is_named_by_its_own_words(run_dir: Path) -> None:
    failure = {"rank": 1, "step": 2, "message": "torch.OutOfMemoryError: CUDA out of memory", "time": 1.0}
    text = json.dumps(failure)
    stand_in(run_dir, f"(run_dir / 'failure.1.json').write_text('''{text}'''); sys.exit(1)")
    assert train(RECIPE, []) == 3
    ended = record(run_dir).ended
    assert ended is not None
    assert (ended.how, ended.rank, ended.step) == ("oom", 1, 2)


@pytest.mark.parametrize("status", [2, 4])
@pytest.mark.parametrize("peer", [-15, 143, None])
def test_what_a_rank_refuses_is_no_crash(run_dir: Path, status: int, peer: int | None) -> None:
    """Its peer refuses too, or torchrun ends it: by a signal, which it may turn into an exit status."""
    summary = SUMMARY.replace("exitcode  : 1 ", f"exitcode  : {status} ")
    summary = summary.replace("exitcode  : -9 ", f"exitcode  : {peer or status} ")
    stand_in(run_dir, f"print('''{summary}'''); sys.exit(1)")
    assert train(RECIPE, []) == status


def test_record_of_the_run_that_did_it_all_survives_nothing_to_do(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "run.json").write_text("the record")
    summary = re.sub(r"exitcode  : -?\d+", "exitcode  : 4", SUMMARY)
    stand_in(run_dir, f"print('''{summary}'''); sys.exit(1)")
    assert train(RECIPE, []) == 4
    assert (run_dir / "run.json").read_text() == "the record"


def _start(output: int) -> subprocess.Popen[bytes]:
    """Train in a process of its own."""
    program = (
        "import sys; from pathlib import Path; from lora_suite.launch.training import train\n"
        f"sys.exit(train(Path({str(RECIPE)!r}), []))"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=output)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_ranks_and_is_recorded(run_dir: Path, number: signal.Signals) -> None:
    stand_in(
        run_dir,
        "import signal, subprocess, time\n"
        "ignore = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)'\n"
        "rank = subprocess.Popen([sys.executable, '-c', ignore], start_new_session=True)\n"
        "(run_dir / 'pid').write_text(str(rank.pid))\n"
        "time.sleep(99)",
    )
    process = _start(subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (run_dir / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(timeout=10) == 130
    pid = int((run_dir / "pid").read_text())
    assert not alive(pid)
    ended = record(run_dir).ended
    assert ended is not None
    assert (ended.how, ended.status) == ("interrupted", 130)


def test_process_left_behind_holding_the_output_does_not_hold_the_end(run_dir: Path) -> None:
    stand_in(run_dir, "import subprocess; subprocess.Popen(['sleep', '30'], start_new_session=True)")
    start = time.monotonic()
    assert train(RECIPE, []) == 0
    assert time.monotonic() - start < 20


def test_ranks_write_to_a_terminal_where_the_launcher_does(run_dir: Path) -> None:
    stand_in(run_dir, "print('terminal:', sys.stdout.isatty(), os.get_terminal_size(1).columns)")
    ours, theirs = pty.openpty()
    process = _start(theirs)
    os.close(theirs)
    output = b""
    while b"\n" not in output.partition(b"terminal:")[2]:
        output += os.read(ours, 4096)
    assert process.wait(timeout=20) == 0
    os.close(ours)
    assert b"terminal: True" in output


def test_launching_process_never_imports_torch(run_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lora_suite.launch.training import train\n"
        f"train(Path({str(RECIPE)!r}), [])\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
