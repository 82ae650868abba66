# SPDX-License-Identifier: Apache-2.0
"""Traces of torch's profiler, made by hand: who took how long, in which phase."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lora_suite.config.errors import ConfigError
from lora_suite.launch.traces import Profile, Timed, read_trace


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None, tid: int = 1) -> Any:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 7,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


# Two steps of 100 µs. The kernel of the first step runs while the host is in the phase after the one that
# launched it, as kernels do.
STEPS = [
    {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
    event("user_annotation", "ProfilerStep#3", 0, 100),
    event("user_annotation", "ProfilerStep#4", 100, 100),
    event("user_annotation", "phase/forward_backward", 0, 60),
    event("user_annotation", "phase/optimizer", 60, 40),
    event("gpu_user_annotation", "phase/forward_backward", 65, 20, tid=9),
    event("cuda_runtime", "cudaLaunchKernel", 50, 4, correlation=11),
    event("kernel", "gemm", 70, 15, correlation=11, tid=9),
    event("cuda_runtime", "cudaGraphLaunch", 61, 6, correlation=12),
    event("kernel", "adam", 90, 2, correlation=12, tid=9),
    event("kernel", "adam", 93, 3, correlation=12, tid=9),
    event("gpu_memcpy", "Memcpy HtoD", 30, 1, tid=9),
    event("cuda_runtime", "cudaLaunchKernel", 150, 4, correlation=13),
    event("kernel", "gemm", 160, 25, correlation=13, tid=9),
    # aten::linear of 20 µs calls aten::t (2 µs) and aten::mm (12 µs), which calls aten::empty (1 µs).
    event("cpu_op", "aten::linear", 10, 20),
    event("cpu_op", "aten::t", 11, 2),
    event("cpu_op", "aten::mm", 14, 12),
    event("cpu_op", "aten::empty", 15, 1),
    # The backward pass has a thread of its own.
    event("cpu_op", "aten::mm", 12, 10, tid=2),
]


def write(path: Path, events: Any, packed: bool = False) -> Path:
    content = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return path


def rows(profile: Profile) -> dict[tuple[str, str], tuple[int, float, float]]:
    return {(row.name, row.phase): (row.count, row.device_us, row.host_us) for row in profile.timed}


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_belong_to_the_phase_that_launched_them(tmp_path: Path, packed: bool) -> None:
    # The name does not tell whether it is packed.
    profile = read_trace(write(tmp_path / "trace.json", STEPS, packed))
    assert profile.steps == 2
    kernels = {key: row for key, row in rows(profile).items() if not key[0].startswith("aten")}
    assert kernels == {
        ("gemm", "forward_backward"): (1, 15.0, 4.0),
        ("adam", "optimizer"): (2, 5.0, 6.0),  # one launch of a graph for both
        ("Memcpy HtoD", "forward_backward"): (1, 1.0, 0.0),  # launched by nobody: where it ran
        ("gemm", ""): (1, 25.0, 4.0),  # the second step has no phases
    }


def test_operators_have_their_own_time_only(tmp_path: Path) -> None:
    operators = {row.name: row for row in read_trace(write(tmp_path / "t", STEPS)).timed}
    assert operators["aten::linear"].host_us == pytest.approx(20 - 2 - 12)
    assert operators["aten::t"].host_us == pytest.approx(2)
    assert operators["aten::mm"].host_us == pytest.approx((12 - 1) + 10)
    assert operators["aten::mm"].count == 2
    assert operators["aten::empty"].host_us == pytest.approx(1)
    assert all(
        (operators[name].kind, operators[name].device_us) == ("operator", 0.0) for name in ("aten::mm",)
    )


def test_a_list_of_events_and_the_words_of_old_releases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(
        json.dumps(
            [
                event("Kernel", "gemm", 5, 3, correlation=1),
                event("Runtime", "cudaLaunchKernel", 1, 2, correlation=1),
                event("Operator", "aten::mm", 0, 4),
            ]
        )
    )
    profile = read_trace(path)
    assert profile.steps == 0
    assert rows(profile) == {("gemm", ""): (1, 3.0, 2.0), ("aten::mm", ""): (1, 0.0, 4.0)}


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = Timed(kind="kernel", name="gemm", phase="optimizer", count=3, device_us=1.5, host_us=0.25)
    Profile(steps=2, timed=[row]).write(tmp_path / "kernels.json")
    assert Profile.read(tmp_path / "kernels.json") == Profile(steps=2, timed=[row])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read as a trace"),
        (b"{", "cannot be read as a trace"),
        (b"\x1f\x8bnot packed at all", "cannot be read as a trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12], "cannot be read as a trace"),
        (b"\xff\xfe\x00", "cannot be read as a trace"),
        (b"3", "no traceEvents"),
        (b'{"traceEvents": 3}', "no traceEvents"),
        (b'{"traceEvents": [7, {"name": "x"}]}', "no kernel and no operator"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_files_that_are_not_there_or_not_profiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No such file"):
        Profile.read(tmp_path / "none.json")
    (tmp_path / "kernels.json").write_text('{"steps": "many"}')
    with pytest.raises(ConfigError, match="not a profile"):
        Profile.read(tmp_path / "kernels.json")
