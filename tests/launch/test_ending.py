# SPDX-License-Identifier: Apache-2.0
"""Reading how a run ended out of its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_suite.launch.ending import RankExit, TorchrunReport, crash, last_lines, plain, rank_exits, read_tail
from lora_suite.launch.failure import Failure


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (b"a\nb\n", "a\nb\n"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"10 %\r20 %\r100 %\nend", "100 %\nend"),
        (b"10 %\r20 %\r", "20 %"),
        (b"\x1b[31mred\x1b[0m \x1b[2K\x1b[?25lx", "red x"),
        (b"\xff", "\ufffd"),
    ],
)
def test_terminal_output_as_text(output: bytes, text: str) -> None:
    assert plain(output) == text


def test_last_lines_leave_out_blanks_and_torchruns_report() -> None:
    own = [f"line {number}" for number in range(30)]
    report = [
        "E1130 12:37:52.391000 211 .venv/lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed",
        "Traceback (most recent call last):",
    ]
    assert last_lines("\n\n".join([*own, *report])) == own[-20:]
    assert last_lines("a\nb\n", 1) == ["b"]
    # Where there is nothing else, the report is better than nothing.
    assert last_lines("\n".join(report)) == report
    assert last_lines("") == []


REPORT = (
    b"step 1\rE12 of the user's own\n"
    b"W1130 12:37:52.391000 211 torch/distributed/elastic/api.py:1010] Sending process 11 closing signal\n"
    b"error: data.train.data_path: no such file\n"
    b"E1130 12:37:52.391000 211 torch/distributed/elastic/api.py:1002] failed (exitcode: 2)\n"
    b"Traceback (most recent call last):\nChildFailedError:\n  rank      : 0 (local_rank: 0)\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, 60, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_torchruns_report_is_not_shown_however_it_comes(size: int, end: bytes) -> None:
    output, report = REPORT.replace(b"\n", end), TorchrunReport()
    shown = b"".join(report.without(output[at : at + size]) for at in range(0, len(output), size))
    words = [b"step 1\rE12 of the user's own", b"error: data.train.data_path: no such file", b""]
    assert shown == end.join(words)


def test_ranks_of_a_summary_whose_fields_end_in_spaces() -> None:
    text = "  rank      : 3 (local_rank: 1)\n  exitcode  : 143 (pid: 7) \n"
    text += "  rank      : 12 (local_rank: 4)\n  exitcode  : -11 (pid: 8)"
    assert rank_exits(text) == [RankExit(3, 143), RankExit(12, -11)]


def test_tail_of_a_long_log_is_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 1_000_000 + "\nlast")
    assert read_tail(log).endswith("x\nlast")
    assert len(read_tail(log)) < 100_000
    assert read_tail(tmp_path / "none") == ""


def test_earliest_failure_counts(tmp_path: Path) -> None:
    Failure(rank=0, step=3, message="consequence", time=2.0).write(tmp_path)
    Failure(rank=1, step=2, message="cause", time=1.0).write(tmp_path)
    (tmp_path / "failure.2.json").write_text("{")
    ended = crash(tmp_path, "", 3)
    assert (ended.rank, ended.step, ended.message) == (1, 2, "cause")


def test_silent_end_still_has_a_message(tmp_path: Path) -> None:
    assert crash(tmp_path, "", 7).message == "ended with status 7 and wrote nothing"


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.OutOfMemoryError: x",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        "MemoryError",
    ],
)
def test_out_of_memory_is_recognised(tmp_path: Path, text: str) -> None:
    assert crash(tmp_path, text, 3).how == "oom"
