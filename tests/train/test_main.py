# SPDX-License-Identifier: Apache-2.0
"""How a rank ends: its exit status, its last words, and what it keeps when told to stop."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from lora_suite.config import ConfigError
from lora_suite.launch.failure import Failure, first_failure
from lora_suite.train import __main__ as entry


class Left(BaseException):
    """Stands for the end of the process."""


class Ending:
    """A program that reaches a step and then ends as told."""

    def __init__(self, run_dir: Path, end: BaseException | int) -> None:
        self.run_dir = run_dir
        self.step = 7
        self._end = end

    def explain_memory(self) -> str:
        return "what was held; what to set"

    def run(self) -> int:
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end


def leave(run_dir: Path, end: BaseException | int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of a rank whose program ends so."""
    statuses: list[int] = []

    def stop(status: int) -> None:
        statuses.append(status)
        raise Left

    monkeypatch.setattr(os, "_exit", stop)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(entry, "Program", lambda folder: Ending(folder, end))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(Left):
        entry.main(run_dir)
    return statuses[0]


def failure(run_dir: Path) -> Failure:
    found = first_failure(run_dir)
    assert found is not None
    return found


def test_success_and_nothing_to_do_leave_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leave(tmp_path, 0, monkeypatch) == 0
    assert leave(tmp_path, 4, monkeypatch) == 4
    assert first_failure(tmp_path) is None


def test_a_crash_names_rank_step_and_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(tmp_path, RuntimeError("no such shape\nmore of it"), monkeypatch) == 1
    found = failure(tmp_path)
    assert (found.rank, found.step, found.message) == (3, 7, "RuntimeError: no such shape")
    assert "Traceback" in capsys.readouterr().err


def test_where_memory_ran_out_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leave(tmp_path, RuntimeError("CUDA error: out of memory\nmore of it"), monkeypatch) == 1
    said = "RuntimeError: CUDA error: out of memory; what was held; what to set"
    assert failure(tmp_path).message == said


def test_bad_input_shows_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(tmp_path, ConfigError("rows.jsonl:3: no key 'output'"), monkeypatch) == 2
    assert failure(tmp_path).message == "rows.jsonl:3: no key 'output'"
    assert "Traceback" not in capsys.readouterr().err


def test_told_to_stop_it_leaves_with_the_signals_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append((number, handler)))
    with pytest.raises(SystemExit) as stop:
        entry._leave_orderly(signal.SIGTERM, None)
    assert handlers == [(signal.SIGTERM, signal.SIG_IGN)]
    assert leave(tmp_path, stop.value, monkeypatch) == 143
    assert first_failure(tmp_path) is None


def test_an_error_without_words_still_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, AssertionError(), monkeypatch)
    assert json.loads((tmp_path / "failure.3.json").read_text())["message"] == "AssertionError: no message"
