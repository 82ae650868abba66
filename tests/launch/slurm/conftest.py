# SPDX-License-Identifier: Apache-2.0
"""A cluster for the tests of this folder, and a suite of stub trainers to submit to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.slurm.cluster import cluster, missing

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 240.0

# What a trainer of five steps leaves. `mode` says what else it does.
TRAINER = """
import json, os, pathlib, sys, time
name, mode = sys.argv[1:3]
out = pathlib.Path(f"out-{name}")
out.mkdir()
log = pathlib.Path("ran.txt").open("a")
log.write(f"{name} {os.environ['SLURM_JOB_ID']} {os.environ['SLURM_JOB_NODELIST']} {time.time()}\\n")
log.flush()
if mode == "hang" or (mode == "hang-once" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
                      and not pathlib.Path("hung").exists()):
    pathlib.Path("hung").touch()
    time.sleep(600)
if mode == "crash":
    sys.exit("RuntimeError: no such kernel")
if mode == "nan" :
    loss = float("nan")
if mode == "nccl" and not pathlib.Path("failed").exists():
    pathlib.Path("failed").touch()
    sys.exit("torch.distributed.DistBackendError: NCCL error: ncclSystemError: socket")
steps = [str(step) for step in range(1, 6)]
loss = {step: 3.0 - 0.1 * int(step) for step in steps}
if mode == "nan":
    loss["3"] = float("nan")
metrics = {"train/loss": loss, "train/global_valid_toks": dict.fromkeys(steps, 100)}
for metric in ("total_step_time", "step_time"):
    metrics[f"timing/train/{metric}"] = {step: 0.1 + 0.001 * int(step) for step in steps}
time.sleep(0.5)
(out / "metrics.json").write_text(json.dumps(metrics))
"""


@pytest.fixture(scope="session")
def slurm_conf() -> Iterator[Path]:
    """A cluster of two nodes; skips where there can be none."""
    reason = missing()
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with cluster() as conf:
        yield conf


class Project:
    """A suite of stub trainers in a folder of its own, and what is done with it on the cluster."""

    def __init__(self, folder: Path, conf: Path) -> None:
        self.folder = folder
        self.environment = {
            **{
                name: text
                for name, text in os.environ.items()
                if not name.startswith(("LORA_SUITE_", "SLURM_"))
            },
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SLURM_CONF": str(conf),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        (folder / "suites").mkdir(parents=True)
        (folder / "suites" / "trainer.py").write_text(TRAINER)
        self.site(poll_seconds=0.2)

    def site(self, **keys: Any) -> None:
        """Write the site file."""
        (self.folder / "site.yaml").write_text(
            json.dumps({"partition": "debug", "poll_seconds": 0.2, **keys})
        )

    def suite(
        self, cases: dict[str, str], name: str = "stub", *, minutes: float = 1, nodes: int = 1, **keys: Any
    ) -> Path:
        """Write a suite of external cases: name to mode. keys: the suite's further ones."""
        listed = [
            {
                "case": case,
                "external": {
                    "command": f"{{python}} trainer.py {case} {mode}",
                    "outputs": [f"out-{case}"],
                    "metrics": f"out-{case}/metrics.json",
                    "steps": 5,
                    "minutes": minutes,
                    "gpus": 2,
                    "nodes": nodes,
                    "declares": {"model": "stub", "tokens_per_step": 100},
                },
            }
            for case, mode in cases.items()
        ]
        path = self.folder / "suites" / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, "cases": listed, "warmup": 0, **keys}))
        return path

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `lora-suite`."""
        return subprocess.Popen(
            [sys.executable, "-m", "lora_suite", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, suite: Path, *words: str) -> subprocess.Popen[str]:
        """Start `lora-suite run --launcher slurm`."""
        return self.start("run", str(suite), "--launcher", "slurm", "--site", "site.yaml", *words)

    def run(self, suite: Path, *words: str) -> tuple[int, dict[str, Any], str]:
        """Exit status, verdict and output of a whole run."""
        return self.ended(self.submit(suite, *words), suite.stem)

    def ended(self, process: subprocess.Popen[str], suite: str) -> tuple[int, dict[str, Any], str]:
        """The same of one that was started."""
        output, _ = process.communicate(timeout=SECONDS)
        assert (self.folder / "results").is_dir(), output
        verdict = self.results(suite) / "verdict.json"
        assert verdict.is_file(), output
        return process.returncode, json.loads(verdict.read_text()), output

    def results(self, suite: str = "stub") -> Path:
        """The newest results folder of a suite."""
        return max((self.folder / "results" / suite).iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def slurm(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextlib.contextmanager
    def down(self, node: str) -> Iterator[None]:
        """Take a node down within the block."""
        self.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        yield
        # A node whose daemon answers may be back by itself, and is not to be resumed then.
        words = ["scontrol", "update", f"nodename={node}", "state=resume"]
        subprocess.run(words, env=self.environment, capture_output=True, check=False)
        self.await_(lambda: self.slurm("sinfo", "--noheader", "--nodes", node, "--format=%T") == "idle")

    def queue(self) -> list[tuple[str, str, str]]:
        """Id, state and name of every job that is alive."""
        listed = self.slurm("squeue", "--noheader", "--format=%i|%T|%j").splitlines()
        return [(number, state, name) for number, state, name in (line.split("|") for line in listed)]

    def ran(self) -> list[list[str]]:
        """Case, job and nodes of every trainer that began."""
        path = self.folder / "suites" / "ran.txt"
        return [line.split()[:3] for line in path.read_text().splitlines()] if path.exists() else []

    def await_(self, what: Callable[[], object]) -> Any:
        """Wait until something holds."""
        deadline = time.monotonic() + SECONDS
        while not (found := what()):
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.05)
        return found


@pytest.fixture
def project(tmp_path: Path, slurm_conf: Path) -> Project:
    """A folder with a stub trainer."""
    return Project(tmp_path / "project", slurm_conf)


def states(verdict: dict[str, Any]) -> dict[str, str]:
    """State of every run, by case and repeat."""
    return {f"{run['case']} {run['repeat']}": run["state"] for run in verdict["runs"]}
