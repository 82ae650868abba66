# SPDX-License-Identifier: Apache-2.0
"""The table: short and whole on a terminal, uncut anywhere else."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lora_suite.judge.verdict import PairCheckVerdict, SuiteVerdict
from lora_suite.report.problems import problems, short_name
from lora_suite.report.terminal import render
from tests.report.helpers import CASES, RATIO, check, pair, run, suite
from tests.report.nights import night

LONG = "reason " * 60


def lines(verdict: SuiteVerdict, width: int = 80, *, terminal: bool = True, **options: object) -> list[str]:
    """What is printed, line by line."""
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=terminal, color_system=None, **options)
    render(verdict, console)
    return screen.getvalue().splitlines()


def row(verdict: SuiteVerdict, start: str, width: int = 160) -> list[str]:
    """The words of the one line that holds `start`."""
    (found,) = [line for line in lines(verdict, width) if start in line]
    return re.split(r" {1,}", found.strip())


@pytest.mark.parametrize("width", [80, 160])
def test_the_smoke_suite_fits(width):
    text = lines(suite(), width)
    assert len(text) <= 20
    assert max(map(len, text)) <= width
    assert not [line for line in text[:-2] if "…" in line and "backends" not in line]


def test_the_first_and_last_lines_tell_what_and_how_it_ended():
    text = lines(suite())
    assert text[0] == "smoke: 16 runs, 3 pairs, 3 min 12 s"
    assert text[-2:] == ["results: results/smoke/20260301-120000-0a1b2c", "PASS (exit 0): 19 PASS"]


def test_a_case_is_one_row_of_all_its_runs():
    verdict = suite()
    verdict.runs[1].summary = {"final_loss": 1.3, "median_step_time": 0.2, "peak_memory_gib": 0.75}
    assert row(verdict, f"{CASES[0]} ") == ["PASS", CASES[0], "4/4", "4/4", "1.2346", "0.103", "0.75"]


def test_the_floor_stands_beside_step_times_where_a_run_knows_it():
    verdict = suite()
    assert "floor" not in lines(verdict)[1].split()
    verdict.runs[0].summary = {**verdict.runs[0].summary, "floor_time": 0.02}
    header, first, *_ = lines(verdict, 160)[1:]
    assert header.split()[-5:] == ["s/step", "floor", "×", "floor", "GiB"]
    assert first.split()[-4:] == ["0.103", "0.02", "5.17", "0.50"]
    assert row(verdict, f"{CASES[1]} ")[-3:-1] == ["-", "-"]


@pytest.mark.parametrize("term", ["arithmetic", "memory", "communication", "update"])
def test_the_term_that_binds_the_floor_is_named(term):
    verdict = suite()
    verdict.runs[0].summary = {**verdict.runs[0].summary, "floor_time": 0.02}
    verdict.runs[0].floor_bound = term
    assert lines(verdict, 160)[2].split()[-3:] == ["5.17", term[:5], "0.50"]


def test_a_case_that_measured_nothing_has_no_figures():
    verdict = suite()
    broken = [
        run(CASES[0], repeat, state="ERROR", own_state="ERROR", checks=[], summary={}) for repeat in (1, 2)
    ]
    verdict.runs = [*broken, *verdict.runs[4:]]
    found = next(line for line in lines(verdict, 160) if line.startswith("ERROR"))
    assert found.split() == ["ERROR", CASES[0], "0/2", "-", "-", "-", "-"]


def test_a_ratio_shows_effect_interval_limit_and_what_could_be_seen():
    words = row(suite(), "fsdp2: ")
    assert " ".join(words) == "PASS fsdp2: lora/full step_time 0.931 [0.880, 0.985] < 2 ≥ 7.5 %"


@pytest.mark.parametrize(("smallest", "words"), [(74.2, "> 1000 %"), (None, "-")])
def test_what_could_be_seen_may_be_nothing(smallest, words):
    verdict = suite(pairs=[pair()])
    verdict.pairs[0].checks[0].effect.smallest_detectable = smallest
    assert " ".join(row(verdict, "fsdp2: ")).endswith(f"< 2 {words}")


def test_other_pair_checks_show_their_value():
    words = row(suite(), "validation/loss")
    assert " ".join(words) == "PASS backends: validation/loss max_rel_diff 3.21e-07 - < 0.0001 -"


def test_a_pair_that_lacks_runs_is_not_green_whatever_its_check_says():
    verdict = suite(pairs=[pair(own_state="MISSING", message="lora run 2: did not run")])
    assert row(verdict, "0.931")[0] == "MISSING"


def test_a_pair_without_any_verdict_on_its_checks_still_has_a_row():
    verdict = suite(pairs=[pair(state="INCOMPARABLE", own_state="INCOMPARABLE", message="differ", checks=[])])
    assert row(verdict, " - ") == ["INCOMPARABLE", "fsdp2", "-", "-", "-", "-"]


class TestProblems:
    """Everything that is not PASS is named."""

    def failing(self, count: int = 4, message: str = "misses its limit by 55 %") -> SuiteVerdict:
        """One case whose runs fail their check."""
        verdict = suite()
        for each in verdict.runs[:count]:
            each.state = "FAIL"
            each.checks = [check("FAIL", value="3.1", message=message)]
        return verdict

    def test_repeats_are_taken_together_on_a_terminal(self):
        (line,) = [line for line in lines(self.failing(), 160) if line.startswith("FAIL") and "run" in line]
        assert line == f'FAIL {CASES[0]} run 1-4: last(data["train/loss"]) < 2: 3.1, misses its limit by 55 %'

    def test_and_listed_one_by_one_elsewhere(self):
        found = [line for line in lines(self.failing(), terminal=False) if "misses its limit" in line]
        assert [line.split(":")[0][-5:] for line in found] == ["run 1", "run 2", "run 3", "run 4"]

    def test_nothing_is_cut_where_there_is_no_terminal(self):
        text = lines(self.failing(message=LONG.strip()), terminal=False)
        assert sum(LONG.strip() in line for line in text) == 4
        assert "validation/loss max_rel_diff" in "\n".join(text)

    def test_a_long_message_is_cut_to_what_fits_on_a_terminal(self):
        verdict = self.failing(message=LONG * 5)
        verdict.pairs[0] = pair(
            state="FAIL", checks=[PairCheckVerdict(expression=RATIO, state="FAIL", message=LONG)]
        )
        text = lines(verdict)
        # What is beside the pair's check comes on top of the lines that messages get.
        assert len(text) <= 21
        assert max(map(len, text)) <= 80
        # The pair's message is whole, that of the runs is cut to its one line.
        assert "\n".join(text).count("reason") == LONG.count("reason")
        assert [line for line in text if line.endswith("…") and "run 1-4" in line]

    @pytest.mark.parametrize("width", range(40, 72))
    def test_no_line_begins_with_a_percent_sign(self, width):
        message = "nor lies it below; smallest detectable effect 1.4 %, of the last night 12.5 % and 3 %"
        verdict = self.failing(message=message)
        verdict.pairs[0] = pair(
            state="FAIL", checks=[PairCheckVerdict(expression=RATIO, state="FAIL", message=message)]
        )
        text = lines(verdict, width)
        assert max(map(len, text)) <= width
        assert not [line for line in text if line.lstrip().startswith("%")]
        assert any("1.4 %" in line for line in text)

    def test_what_is_wrong_with_pairs_is_never_pushed_out_by_runs(self):
        verdict = suite()
        for number, each in enumerate(verdict.runs):
            each.state = each.own_state = "ERROR"
            each.message = f"crashed: reason {number}"
        check = PairCheckVerdict(expression=RATIO, state="FAIL", message="too slow")
        verdict.pairs[2] = pair(name="last", state="FAIL", checks=[check])
        assert any("too slow" in line for line in lines(verdict))
        # A pair that lacks runs says less than they do.
        verdict.pairs[2] = pair(name="last", state="MISSING", own_state="MISSING", message="lacks runs")
        assert not any("lacks runs" in line for line in lines(verdict))

    def test_what_does_not_fit_is_counted(self):
        verdict = suite()
        for number, each in enumerate(verdict.runs):
            each.state = each.own_state = "ERROR"
            each.message = f"crashed: reason {number}"
        text = lines(verdict)
        assert "… and 10 ERROR more in verdict.json" in text
        assert len(text) == 20

    def test_last_lines_of_a_log_are_shown_with_their_brackets(self):
        verdict = suite()
        verdict.runs[0] = run(
            state="ERROR",
            own_state="ERROR",
            checks=[],
            message="crashed: x\n  [red]boom[/red]\n  ValueError: [1, 2]",
        )
        text = lines(verdict)
        assert "  [red]boom[/red]" in text
        assert "  ValueError: [1, 2]" in text

    def test_of_a_long_log_the_end_is_shown(self):
        log = "\n".join(f"  line {number}" for number in range(1, 21))
        verdict = suite()
        verdict.runs[0] = run(state="ERROR", own_state="ERROR", checks=[], message=f"crashed: x\n{log}")
        text = lines(verdict)
        assert len(text) == 20
        assert text[-3] == "  line 20"
        assert "  line 1" not in text

    def test_runs_that_broke_differently_are_different_problems(self):
        verdict = suite()
        for number, each in enumerate(verdict.runs[:4]):
            each.state = each.own_state = "ERROR"
            each.message = f"crashed: {number % 2}\nline"
        found = [problem.place for problem in problems(verdict, brief=True)]
        assert found == [f"{CASES[0]} run 1, 3", f"{CASES[0]} run 2, 4"]

    def test_no_state_but_pass_goes_without_a_problem(self):
        for state in ("FAIL", "ERROR", "MISSING", "INCOMPARABLE", "INCONCLUSIVE"):
            verdict = suite(
                runs=[
                    run(state=state, own_state=state, message="m"),
                    run(repeat=2, checks=[check(state, message="m")]),
                ],
                pairs=[pair(state=state), pair(state=state, own_state=state, message="m", checks=[])],
            )
            assert [problem.state for problem in problems(verdict, brief=False)] == [state] * 4


class TestEvidence:
    """What stands beside a problem."""

    @pytest.mark.parametrize("width", [80, 160])
    def test_a_night_in_full_fits_the_width(self, width):
        text = lines(night(pairs=3), width)
        assert max(map(len, text)) <= width
        shown = "\n".join(text)
        assert "full 0.3196 → lora 0.27 s  │                ├●─┤" in shown
        assert "▇█████" in shown
        words = " ".join(shown.split())
        assert (
            "cause: only the LoRA arm moved against the baseline of 2026-02-20; full +0.1 % [-0.5, +0.7]; "
            "lora +22.7 % [+22.1, +23.3]; optimizer +0.0499 s of +0.0499 s" in words
        )

    def test_elsewhere_it_is_one_line_a_piece(self):
        text = lines(night(pairs=3), terminal=False)
        (found,) = [line for line in text if "├●─┤" in line]
        assert found.split("  ")[-1].startswith("nights ▁")
        assert len([line for line in text if "cause: only the LoRA arm" in line]) == 1

    def test_pairs_come_first_where_there_are_many(self):
        verdict = night(pairs=3)
        for one in (each.checks[1] for each in verdict.runs if each.arm == "lora"):
            one.state = "FAIL"
        assert any("├●─┤" in line for line in lines(verdict, 160))
        assert sum("nights" in line for line in lines(verdict, 160)) == 3

    def test_alerts_of_the_history_and_flags_of_the_machine_are_notes(self):
        text = lines(night(pairs=3), 160)
        case = "sft-llama3.1-8b-1n8g-fsdp2-lora"
        alert = "above the control limit: +22.9 % since 6 runs"
        assert f"note: {case}: timing/train/step_time: {alert}" in text
        assert f"note: {case} run 2: GPU 3 was throttled for heat in 12 of 40 samples" in text

    def test_many_flags_are_counted(self):
        verdict = suite()
        for each in verdict.runs:
            each.health = ["throttled", "shared"]
        flagged = [line for line in lines(verdict, 160) if "throttled" in line]
        assert flagged == [f"note: {CASES[0]} run 1-4: throttled (and 7 more in verdict.json)"]
        assert len([line for line in lines(verdict, terminal=False) if "run 1-4: shared" in line]) == 4

    def test_flags_that_a_pair_repeats_are_told_once(self):
        verdict = suite(pairs=[pair(notes=["full run 1: throttled", "judged on 3 of 4 repeats"])])
        verdict.runs[0].health = ["throttled"]
        told = [line for line in lines(verdict, 160) if line.startswith("note")]
        assert told == ["note: fsdp2: judged on 3 of 4 repeats", f"note: {CASES[0]} run 1: throttled"]

    def test_a_run_that_warms_the_machine_is_in_no_figure(self):
        verdict = suite()
        verdict.runs.insert(0, run(CASES[0], 0, summary={"median_step_time": 99.0}))
        assert row(verdict, f"{CASES[0]} ")[-2:] == ["0.103", "0.50"]


def test_a_stream_that_knows_only_ascii_gets_look_alikes():
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    render(night(pairs=3), Console(file=screen, width=80, force_terminal=True, color_system=None))
    screen.seek(0)
    text = screen.read().splitlines()
    assert "     full 0.3196 > lora 0.27 s  |                [o-]" in text
    assert max(map(len, text)) <= 80


def test_notes_and_what_was_not_judged():
    verdict = suite(pairs=[pair(notes=["planted fault: debug.faults.slow_step (1.0 and 3.0)"])])
    for each in verdict.runs[:4]:
        each.not_judged = ["a < 1 (only when policy.init=pretrained; here it is random)"]
    text = lines(verdict)
    assert "note: fsdp2: planted fault: debug.faults.slow_step (1.0 and 3.0)" in text
    assert "note: 1 check not judged, conditions not met (verdict.json)" in text
    elsewhere = lines(verdict, terminal=False)
    assert f"note: not judged: {CASES[0]}: {verdict.runs[0].not_judged[0]}" in elsewhere


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"interrupted": True}, "INTERRUPTED (exit 130): 19 PASS"),
        ({"runs": [], "pairs": []}, "MISSING (exit 4): nothing ran"),
        (
            {"pairs": [pair(state="FAIL"), pair(state="INCONCLUSIVE")]},
            "FAIL (exit 1): 16 PASS, 1 FAIL, 1 INCONCLUSIVE",
        ),
    ],
)
def test_the_last_line(changes, line):
    assert lines(suite(**changes))[-1] == line


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        (RATIO, "lora/full step_time"),
        ('ratio(a["train/loss"], b["validation/loss"], 5) <= 1', "a/b train/loss validation/loss"),
        ('max_rel_diff(a["train/loss"], b["train/loss"]) < 1e-4', "train/loss max_rel_diff"),
        (RATIO.replace("ratio", "tail_ratio"), "lora/full step_time tail_ratio"),
        ('peak_ratio(a["memory/x"], b["memory/x"]) < 1', "a/b memory/x peak_ratio"),
        ('max(a["x"]) < max(b["x"])', 'max(a["x"]) < max(b["x"])'),
        ("not an expression", "not an expression"),
    ],
)
def test_short_names(expression, name):
    assert short_name(expression) == name


def test_an_unreadable_pair_check_is_printed_too():
    broken = PairCheckVerdict(expression="ratio(", state="ERROR", message="never closed")
    assert any("never closed" in line for line in lines(suite(pairs=[pair(state="ERROR", checks=[broken])])))


def test_colour_only_where_it_is_wanted(monkeypatch):
    def coloured() -> bool:
        screen = io.StringIO()
        render(suite(), Console(file=screen, width=80, force_terminal=True, color_system="standard"))
        return "\x1b[32m" in screen.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


def test_the_width_of_the_console_is_left_as_it_was():
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    render(suite(), console)
    assert console.width == 80
