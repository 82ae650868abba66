# SPDX-License-Identifier: Apache-2.0
"""Which run is next: until a pair is decided, until the budget is over, never two at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lora_suite.campaign.adaptive import Schedule
from lora_suite.campaign.execute import execute
from lora_suite.judge.suite import Execution
from lora_suite.judge.verdict import Effect, PairCheckVerdict, PairVerdict, State
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Plan, PlannedRun
from lora_suite.plan.order import looks_up_to, ordered_runs
from tests.campaign.helpers import FakeLauncher, console, printed, train
from tests.judge.helpers import DONE, FULL, LORA, RATIO, make_case, make_pair, make_plan

LOOKS = (2, 4, 6, 8)
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def plan_with_looks(*names: str, budget: float | None = 60.0, **changes: Any) -> Plan:
    """Pairs of the same two cases, with looks, in the order in which a suite plans them."""
    pairs = tuple(make_pair(8, name=name, looks=LOOKS, **changes) for name in names or ("fsdp2",))
    return make_plan(pairs[0], pairs=pairs, runs=tuple(ordered_runs(pairs, [], 1)), budget_minutes=budget)


class Night:
    """Walks through a schedule with a clock of its own; each run takes its `seconds`."""

    def __init__(
        self,
        plan: Plan,
        answers: dict[str, list[State]],
        seconds: Callable[[PlannedRun], float] = lambda planned: 60.0,
        steady: bool = True,
    ) -> None:
        self.steady = steady
        self.now = 1000.0
        self.looked: list[tuple[str, int]] = []
        self.answers = {name: list(states) for name, states in answers.items()}
        self.executions: dict[PlannedRun, Execution] = {}
        self.schedule = Schedule(plan, self.executions, self._judge, lambda: self.now)
        for planned in self.schedule:
            self.now += seconds(planned)
            self.executions[planned] = Execution(DONE, NOW, seconds(planned))

    def _judge(self, part: Plan) -> PairVerdict:
        (pair,) = part.pairs
        assert {run.pair for run in part.runs} == {pair.name}
        assert len(part.runs) == 2 * pair.repeats
        self.looked.append((pair.name, pair.repeats))
        state = self.answers[pair.name].pop(0)
        effect = Effect(
            estimate=1, low=0.5, high=2, confidence=0.95, repeats=pair.repeats, smallest_detectable=0.014
        )
        check = PairCheckVerdict(expression="x", state=state, effect=effect if self.steady else None)
        own: State = "MISSING" if state == "MISSING" else "PASS"
        return PairVerdict(name=pair.name, arms=pair.arms, state=state, own_state=own, checks=[check])

    def made(self, name: str) -> int:
        return sum(run.pair == name for run in self.executions)


@pytest.mark.parametrize("state", ["PASS", "FAIL"])
def test_a_pair_ends_at_the_look_that_decides_it(state: State) -> None:
    night = Night(plan_with_looks("a"), {"a": ["INCONCLUSIVE", state]})
    assert night.looked == [("a", 2), ("a", 4)]
    assert night.made("a") == 8
    carried = night.schedule.carried_out()
    assert (carried.pairs[0].repeats, carried.pairs[0].ended) == (4, "decided")
    # What was not needed is not planned any more, so nobody can miss it.
    assert set(carried.runs) == set(night.executions)


def test_a_pair_that_more_repeats_cannot_decide_ends_and_is_not_called_decided() -> None:
    night = Night(plan_with_looks("a"), {"a": ["INCONCLUSIVE"]}, steady=False)
    assert night.looked == [("a", 2)]
    assert night.schedule.carried_out().pairs[0].ended == "more repeats would not tell"


def test_an_undecided_pair_is_looked_at_to_the_end() -> None:
    night = Night(plan_with_looks("a"), {"a": ["INCONCLUSIVE"] * 3})
    assert night.looked == [("a", 2), ("a", 4), ("a", 6)]
    carried = night.schedule.carried_out()
    # The last look is the verdict itself.
    assert (carried.pairs[0].repeats, carried.pairs[0].ended) == (8, "")
    assert len(carried.runs) == 16


def test_every_pair_has_its_first_look_before_any_has_its_second() -> None:
    night = Night(plan_with_looks("a", "b"), {"a": ["INCONCLUSIVE"] * 3, "b": ["PASS"]})
    order = [run.pair for run in night.executions]
    assert order[:8] == ["a"] * 4 + ["b"] * 4
    assert night.made("b") == 4
    assert night.made("a") == 16


def test_the_budget_begins_nothing_that_would_not_fit() -> None:
    """4 runs of a minute are made; 4 more would end at minute 8, after a budget of 7."""
    night = Night(plan_with_looks("a", budget=7.0), {"a": ["INCONCLUSIVE"]})
    assert night.made("a") == 4
    carried = night.schedule.carried_out()
    assert (carried.pairs[0].repeats, carried.pairs[0].ended) == (2, "the budget of 7 minutes was over")
    assert len(carried.runs) == 4
    exact = Night(plan_with_looks("a", budget=8.0), {"a": ["INCONCLUSIVE", "INCONCLUSIVE"]})
    assert exact.made("a") == 8


def test_a_look_that_was_begun_is_ended_however_slow_it_became() -> None:
    """The budget is over within the second look: half of it would say nothing."""
    night = Night(
        plan_with_looks("a", budget=9.0),
        {"a": ["INCONCLUSIVE", "INCONCLUSIVE"]},
        lambda planned: 60.0 if planned.repeat < 3 else 600.0,
    )
    assert night.made("a") == 8
    (pair,) = night.schedule.carried_out().pairs
    assert (pair.repeats, pair.ended) == (4, "the budget of 9 minutes was over")


def test_what_had_no_first_look_in_time_is_missing() -> None:
    night = Night(plan_with_looks("a", "b", budget=3.0), {"a": ["MISSING"], "b": ["MISSING"]})
    # The third run ends when the budget does; nothing is begun any more.
    assert len(night.executions) == 3
    carried = night.schedule.carried_out()
    assert [pair.ended for pair in carried.pairs] == ["the budget of 3 minutes was over"] * 2
    assert len([run for run in carried.runs if run not in night.executions]) == 5
    assert night.schedule.absent == "did not run: the budget of 3 minutes was over"


def test_without_a_budget_every_run_is_made_and_nothing_looked_at() -> None:
    plan = make_plan()
    night = Night(plan, {})
    assert tuple(night.executions) == plan.runs
    assert night.schedule.carried_out() == plan
    assert night.schedule.absent == "did not run"


def test_a_pair_that_reuses_runs_has_as_many_repeats_as_both_arms() -> None:
    plan = plan_with_looks("a")
    again = make_pair(8, name="again", looks=LOOKS, reuse=True)
    night = Night(replace(plan, pairs=(*plan.pairs, again)), {"a": ["PASS"]})
    assert [pair.repeats for pair in night.schedule.carried_out().pairs] == [2, 2]


def test_looks_are_even_and_end_with_the_last_repeat() -> None:
    assert looks_up_to(None) == (2, 4, 6, 8)
    assert looks_up_to(4) == (2, 4)
    assert looks_up_to(5) == (2, 4, 5)
    assert looks_up_to(1) == (1,)
    # There are bounds for four looks.
    assert looks_up_to(12) == (2, 4, 6, 8)


# -- with real verdicts ------------------------------------------------------------------------------------


def carried(tmp_path: Path, plan: Plan, launcher: Any) -> tuple[Any, str]:
    """The verdict of a plan and what was printed while it ran."""
    screen = console()
    return execute(plan, tmp_path, launcher, screen, keep=False), printed(screen)


def test_a_clear_pair_ends_early_and_says_its_looks(tmp_path: Path) -> None:
    """LoRA takes 0.7 of the time, the limit is 0.8, the runs scatter by half a percent."""
    verdict, text = carried(tmp_path, plan_with_looks(), FakeLauncher())
    (pair,) = verdict.pairs
    assert (verdict.exit_code, pair.state) == (0, "PASS")
    assert pair.checks[0].effect.repeats == 4
    assert "looked after 2 and 4 of at most 8 repeats: decided" in pair.notes
    # An early look asks for more than 95 %.
    assert pair.checks[0].effect.confidence > 0.99
    assert len(verdict.runs) == 8
    assert "8/≤16 PASS" in text


def test_a_pair_across_its_limit_is_inconclusive_after_the_last_look(tmp_path: Path) -> None:
    def noisy(case: Any, planned: PlannedRun, run_dir: Path) -> Ended:
        sign = 1 if (planned.repeat // 2) % 2 else -1
        return train(case, planned, run_dir, step_time=0.08 * (1 + 0.05 * sign) if case.lora else 0.1)

    launcher = FakeLauncher({(stem, repeat): noisy for stem in (FULL, LORA) for repeat in range(1, 9)})
    verdict, _ = carried(tmp_path, plan_with_looks(), launcher)
    (pair,) = verdict.pairs
    assert (verdict.exit_code, pair.state) == (5, "INCONCLUSIVE")
    assert pair.checks[0].effect.repeats == 8
    assert "smallest detectable effect" in pair.checks[0].message
    assert "looked after 2, 4, 6 and 8 of at most 8 repeats" in pair.notes


def test_an_interrupt_leaves_later_looks_unplanned(tmp_path: Path) -> None:
    def interrupts(case: Any, planned: PlannedRun, run_dir: Path) -> Ended:
        raise KeyboardInterrupt

    verdict, _ = carried(tmp_path, plan_with_looks(), FakeLauncher({(FULL, 2): interrupts}))
    assert verdict.interrupted
    assert len(verdict.runs) == 4
    assert {run.message for run in verdict.runs if run.state == "MISSING"} == {"interrupted"}


def test_no_two_runs_are_ever_at_once(tmp_path: Path) -> None:
    running: list[str] = []

    class Watching(FakeLauncher):
        def run(self, case: Any, planned: PlannedRun, run_dir: Path, **options: Any) -> Ended:
            assert running == []
            running.append(planned.case)
            try:
                return super().run(case, planned, run_dir, **options)
            finally:
                running.remove(planned.case)

    launcher = Watching()
    carried(tmp_path, plan_with_looks("a", "b"), launcher)
    assert len(launcher.ran) == 16


# -- the run that warms the machine ----------------------------------------------------------------------


def warmed_plan() -> Plan:
    pair = make_pair(2, (RATIO.replace("0.8", "2.0"),), warmup_runs=1)
    return make_plan(pair, runs=tuple(ordered_runs([pair], [], 1)))


def test_a_warm_up_run_is_made_first_and_counts_for_nothing(tmp_path: Path) -> None:
    def slow(case: Any, planned: PlannedRun, run_dir: Path) -> Ended:
        return train(case, planned, run_dir, step_time=9.0)

    launcher = FakeLauncher({(FULL, 0): slow})
    verdict, text = carried(tmp_path, warmed_plan(), launcher)
    assert launcher.ran == [(FULL, 0), (FULL, 1), (LORA, 1), (LORA, 2), (FULL, 2)]
    assert verdict.exit_code == 0
    assert [run.repeat for run in verdict.runs] == [1, 1, 2, 2]
    assert verdict.pairs[0].checks[0].effect.estimate == pytest.approx(0.7, rel=0.02)
    assert text.splitlines()[0].startswith(f"1/5 PASS {FULL} warm-up: 10/10 steps")
    assert (tmp_path / FULL / "0" / "metrics.json").is_file()


def test_a_warm_up_run_whose_check_fails_is_not_judged(tmp_path: Path) -> None:
    def fails(case: Any, planned: PlannedRun, run_dir: Path) -> Ended:
        train(case, planned, run_dir, damage=lambda metrics, _: metrics["train/loss"].update({"10": 9.0}))
        return Ended(how="done", status=1)

    verdict, _ = carried(tmp_path, warmed_plan(), FakeLauncher({(FULL, 0): fails}))
    assert (verdict.exit_code, len(verdict.runs)) == (0, 4)


def test_a_warm_up_run_that_breaks_is_seen(tmp_path: Path) -> None:
    def crash(case: Any, planned: PlannedRun, run_dir: Path) -> Ended:
        return Ended(how="oom", status=1, message="out of memory on rank 0")

    verdict, _ = carried(tmp_path, warmed_plan(), FakeLauncher({(FULL, 0): crash}))
    assert verdict.exit_code == 3
    broken = verdict.runs[0]
    assert (broken.repeat, broken.state, broken.summary) == (0, "ERROR", {})
    # The pair was measured all the same.
    assert verdict.pairs[0].state == "PASS"


def test_a_case_is_warmed_once_however_many_pairs_have_it() -> None:
    pairs = [make_pair(2, name=name, warmup_runs=1) for name in ("a", "b", "c")]
    warm = [(run.pair, run.arm) for run in ordered_runs(pairs, [], 1) if run.discarded]
    assert warm == [("a", "full"), ("b", "lora")]


def test_the_plan_reckons_with_the_budget() -> None:
    """16 runs of 3 minutes; a budget of 10 minutes, and the 4 runs that it may have begun."""
    plan = plan_with_looks(budget=10.0)
    assert plan.minutes == 10 + 4 * 3
    assert plan.gpu_hours == pytest.approx(22 * make_case(FULL).gpus / 60)
    assert plan_with_looks(budget=600.0).minutes == 48
