# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: offline by itself, the same metrics, and whatever goes wrong there is a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_suite.config.schema import WandbLogger
from lora_suite.train import sinks
from lora_suite.train.sinks import WandbSink
from tests.train.conftest import LORA, Run
from tests.train.wandb_file import history, run_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = WandbLogger(project="p", name="n")
TRAIN = """
import sys
from pathlib import Path
from lora_suite.train.program import Program
from tests.train.fake_backend import build
sys.exit(Program(Path(sys.argv[1]), build).run())
"""


def clean_environment(folder: Path, **more: str) -> dict[str, str]:
    """No key, no wandb settings, a home without anything."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "HOME": str(folder / "home"), "NETRC": "", "OMP_NUM_THREADS": "1", **more}


def train(run: Run, environment: Mapping[str, str]) -> None:
    """Train in a process of its own, as the only rank of a torchrun."""
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(run.folder)],
        env={**environment, **ranks, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_without_key_or_home_is_complete_offline_and_the_same(new_run: Callable[[str], Run]) -> None:
    pytest.importorskip("wandb")
    plain, logged = new_run("plain"), new_run("logged")
    validation = ("sft.val_period=2", "sft.val_at_start=true")
    plain.train(LORA, *validation)
    logged.write_job(LORA, *validation, "logger.wandb_enabled=true", "logger.wandb.name=mine")
    train(logged, clean_environment(logged.folder, HOME=""))

    for name in ("train/loss", "train/grad_norm", "train/lr", "validation/loss"):
        assert logged.metrics[name] == plain.metrics[name]
    folder = logged.folder / logged.record.link
    assert logged.record.link.startswith("wandb/offline-run-")
    (written,) = folder.glob("*.wandb")
    assert history(written) == logged.metrics
    described = run_of(written)
    assert (described.display_name, described.run_group, described.job_type) == (
        "mine",
        "sft-tiny-llama-1n2c-fsdp2",
        "lora",
    )


SCRIPT = """
import sys
from pathlib import Path
from lora_suite.config.schema import WandbLogger
from lora_suite.train import sinks
sinks._WANDB_SECONDS = 3.0
sink = sinks.WandbSink(WandbLogger(project="p", name="n"), Path(sys.argv[1]), {"a": 1}, group="c", arm="full")
for step in (1, 2):
    sink.log(step, {"train/loss": 2.0 * step, "train/grad_norm": None})
    for second in (0, 10, 20):
        sink.log(second + 100 * step, {"ray/node.0.gpu.0.mem_gb": 1.0 * second})
sink.log(3, {"train/loss": 6.0})
sink.close()
print(sink.link)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        # A key, but nobody answers at the server's port.
        {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        # Told to be online, and again nobody answers.
        {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        # Told to be online without a key: it must not ask for one.
        {"WANDB_MODE": "online"},
    ],
    ids=["unreachable", "online but unreachable", "online without key"],
)
def test_without_a_server_every_value_is_there_offline(tmp_path: Path, more: dict[str, str]) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=clean_environment(tmp_path, **more),
        stdin=subprocess.DEVNULL,
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / done.stdout.splitlines()[-1]).glob("*.wandb")
    # Sampled values in between take no step away from the others.
    assert history(written) == {
        "train/loss": {"1": 2.0, "2": 4.0, "3": 6.0},
        "ray/node.0.gpu.0.mem_gb": {
            str(second + 100 * step): 1.0 * second for step in (1, 2) for second in (0, 10, 20)
        },
    }


def sink(folder: Path) -> WandbSink:
    return WandbSink(CONFIG, folder, {}, group="c", arm="lora")


class FakeWandb:
    """As much of wandb as the sink uses; logging fails, and so does being online."""

    class Error(Exception):
        pass

    Settings = SimpleNamespace

    def __init__(self) -> None:
        self.modes: list[str] = []

    def init(self, **arguments: Any) -> FakeWandb:
        self.modes.append(arguments["mode"])
        self.asked = arguments
        if arguments["mode"] == "online":
            raise self.Error("no such key")
        self.settings = SimpleNamespace(mode=arguments["mode"], sync_dir="/elsewhere/run")
        return self

    def define_metric(self, *arguments: Any, **more: Any) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        raise self.Error("full disk")


def test_a_missing_wandb_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    made = sink(tmp_path)
    made.log(1, {"a": 1.0})
    made.close()
    assert made.link == ""
    assert "wandb is not installed" in capsys.readouterr().err


def test_one_that_fails_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = sink(tmp_path)
    made.log(1, {"a": 1.0})
    made.log(2, {"a": 1.0})
    made.close()
    assert capsys.readouterr().err.count("warning: wandb failed (full disk)") == 1


def test_a_refusal_is_a_warning_and_the_run_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert sink(tmp_path).link == "/elsewhere/run"
    assert fake.modes == ["online", "offline"]
    assert "wandb did not start online (no such key)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "group", "tags"),
    [
        ({}, "c", ["lora"]),
        ({"WANDB_RUN_GROUP": "night", "WANDB_TAGS": "fsdp2, lora"}, "night", ["lora", "fsdp2"]),
    ],
)
def test_the_environment_says_to_which_suite_run_and_pair_it_belongs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    group: str,
    tags: list[str],
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WANDB_MODE": "offline", **variables}.items():
        monkeypatch.setenv(name, value)
    sink(tmp_path)
    assert (fake.asked["group"], fake.asked["tags"]) == (group, tags)


class Reachable:
    """Stands for the network: notes who was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def create_connection(self, address: tuple[str, int], timeout: float) -> Reachable:
        assert timeout < 10.0
        self.asked.append(address)
        return self

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("environment", "mode", "asked"),
    [
        ({}, "offline", []),
        ({"WANDB_API_KEY": "k"}, "online", [("api.wandb.ai", 443)]),
        ({"WANDB_API_KEY": "k", "WANDB_BASE_URL": "http://mine:8080"}, "online", [("mine", 8080)]),
        ({"WANDB_API_KEY": "k", "https_proxy": "http://proxy:3128"}, "online", [("proxy", 3128)]),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline", []),
    ],
)
def test_the_server_is_asked_only_where_there_is_a_key(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], mode: str, asked: list[tuple[str, int]]
) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", "/nowhere")
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    network = Reachable()
    monkeypatch.setattr(sinks, "socket", network)
    assert sinks._wandb_mode() == mode
    assert network.asked == asked
