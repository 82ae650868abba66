# SPDX-License-Identifier: Apache-2.0
"""What is printed of an explanation."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lora_suite.judge.explain import Explanation, explain
from lora_suite.launch.traces import Profile, Timed
from lora_suite.report.explain import headline, render
from tests.judge.explain.sides import run, side

LONG = "triton_poi_fused_" + "_".join(["add", "mul", "silu", "view"] * 40) + "_backward"


def profile(microseconds: float) -> Profile:
    return Profile(
        steps=1,
        timed=[
            Timed(kind="kernel", name=LONG, phase="optimizer", count=3, device_us=microseconds, host_us=0.0),
            Timed(
                kind="kernel",
                name="gemm",
                phase="forward_backward",
                count=round(microseconds / 10),
                device_us=90.0,
                host_us=0.0,
            ),
        ],
    )


def slowed(optimizer: float = 0.0613, **changes: float) -> Explanation:
    base = {"data": 0.001, "forward_backward": 0.02, "grad_sync": 0.0, "optimizer": 0.03}
    left = side("before", run(base, recipe={"dim": 8}), profile=profile(100.0))
    right = side(
        "tonight", run({**base, "optimizer": optimizer, **changes}, recipe={"dim": 16}), profile=profile(400)
    )
    return explain(left, right)


def printed(explanation: Explanation, width: int, terminal: bool = True) -> list[str]:
    stream = io.StringIO()
    render(explanation, Console(file=stream, width=width, force_terminal=terminal, color_system=None))
    return stream.getvalue().splitlines()


def test_a_side_is_shown_as_a_multiple_of_its_floor() -> None:
    explanation = slowed()
    explanation.left.over_floor, explanation.left.floor_bound = 2.18, "memory"
    left, right = (line for line in printed(explanation, 200) if line.startswith(("left:", "right:")))
    assert left.endswith("before/1; 2.18 × its floor, bound by memory")
    assert right.endswith("tonight/1")


def test_the_headline_names_the_phase_and_its_share() -> None:
    assert headline(slowed()) == "optimizer +0.03130 s, 100 % of the slowdown"
    assert headline(slowed(0.0610, data=0.0007)) == "optimizer +0.03100 s, 101 % of the slowdown"


def test_the_headline_names_as_many_phases_as_make_most_of_it() -> None:
    assert headline(slowed(0.05, forward_backward=0.035, data=0.003)) == (
        "optimizer +0.02000 s, 54 %; forward_backward +0.01500 s, 41 % of the slowdown"
    )


def test_the_headline_of_a_speed_up_and_of_no_change() -> None:
    assert headline(slowed(0.02)) == "optimizer -0.01000 s, 100 % of the speed-up"
    assert headline(slowed(0.03)) == "no difference to explain: the step takes +0.00 %"


def test_the_headline_of_a_change_that_is_not_certain() -> None:
    left = side("a", run({"optimizer": 0.2}), run({"optimizer": 0.2}))
    right = side("b", run({"optimizer": 0.2}), run({"optimizer": 0.22}))
    assert headline(explain(left, right)) == (
        "not certain, as the step takes +5.00 % [-58.53, +68.53]: optimizer +0.0100 s, 100 % of the slowdown"
    )


@pytest.mark.parametrize("width", [80, 160])
def test_tables_fit_the_terminal_and_no_figure_is_cut(width: int) -> None:
    lines = printed(slowed(), width)
    assert lines[0] == "optimizer +0.03130 s, 100 % of the slowdown"
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["phase"] == ["phase", "left", "s", "right", "s", "difference", "share"]
    assert rows["optimizer"][1:] == ["0.03000", "0.06130", "+0.03130", "100", "%"]
    assert rows["forward_backward"][1:] == ["0.02000", "0.02000", "0.00000", "0", "%"]
    assert rows["step"][1:] == ["0.05100", "0.08230", "+0.03130", "100", "%"]
    tables = [line for line in lines if line[:5] in ("phase", "optim", "trito", "name ", "what ", "confi")]
    assert all(len(line) <= width for line in tables)
    kernel = next(line for line in lines if line.startswith("triton"))
    assert kernel.split()[-7:] == ["optimizer", "100", "400", "+300", "3", "1", "%"]
    assert "view_backward" in kernel.replace("…", " ") or width == 80
    assert "Kernels, on the device: 13 and 43 a step; +300 µs in all, 1 % of the slowdown" in lines
    assert rows["configuration"] == ["configuration", "dim", "8", "16"]
    assert any(line.startswith("note: a side has one run") for line in lines)


@pytest.mark.parametrize("width", [80, 160])
def test_in_a_log_file_kernels_keep_to_the_width_and_settings_are_whole(width: int) -> None:
    explanation = slowed()
    setting = explanation.unlike[0].model_copy(update={"right": "x" * 300})
    lines = printed(explanation.model_copy(update={"unlike": [setting]}), width, terminal=False)
    kernel = next(line for line in lines if line.startswith("triton_poi"))
    assert len(kernel) <= width
    assert kernel.split()[-7:] == ["optimizer", "100", "400", "+300", "3", "1", "%"]
    name = kernel.split()[0]
    assert "…" in name
    assert name.endswith("_backward")
    assert any("x" * 300 in line for line in lines)


def test_a_name_that_has_room_is_whole() -> None:
    line = next(line for line in printed(slowed(), 1000) if line.startswith("triton_poi"))
    assert line.split()[0] == LONG


def test_kernels_are_counted_where_both_sides_were_profiled() -> None:
    explanation = slowed()
    explanation.right.kernels_per_step = None
    lines = printed(explanation, 160)
    assert "Kernels, on the device: +300 µs in all, 1 % of the slowdown" in lines


def test_kernels_that_explain_nothing_are_not_listed() -> None:
    explanation = slowed(0.06)
    shares = [row.model_copy(update={"share": 0.001}) for row in explanation.kernels]
    lines = printed(explanation.model_copy(update={"kernels": shares}), 100)
    assert "none of them is a part of it" in lines
    assert not any(line.startswith(("gemm", "triton")) for line in lines)


def test_differences_are_counted_where_they_are_many() -> None:
    left, right = ({f"key{number:02}": value for number in range(20)} for value in (1, 2))
    found = explain(side("a", run({"data": 1.0}, recipe=left)), side("b", run({"data": 1.0}, recipe=right)))
    lines = printed(found, 100)
    assert sum(line.startswith("configuration") for line in lines) == 16
    assert "and 4 more, all in --json" in lines


def test_calls_that_changed_are_shown_on_both_sides() -> None:
    explanation = slowed()
    row = explanation.kernels[0].model_copy(update={"left_us": None, "left_calls": 0.0, "right_calls": 2.5})
    lines = printed(explanation.model_copy(update={"kernels": [row]}), 160)
    assert next(line for line in lines if line.startswith("triton")).split()[-7:] == [
        "optimizer",
        "-",
        "400",
        "+300",
        "0→2.5",
        "1",
        "%",
    ]
