# SPDX-License-Identifier: Apache-2.0
"""Canaries: a detector that works is PASS, one that is blind or cries wolf makes the suite INCONCLUSIVE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lora_suite.judge.suite import Execution, judge_suite, run_directory
from lora_suite.judge.verdict import PairVerdict, SuiteVerdict
from lora_suite.plan.model import Canary, Case, Pair, Plan
from lora_suite.plan.order import ordered_runs
from tests.judge.helpers import DONE, FULL, make_case, make_pair, make_plan, write_run

NOW = datetime(2026, 3, 1, tzinfo=UTC)
TIME = '"timing/train/step_time"'
SAME = (f"ratio(again[{TIME}], normal[{TIME}]) < 1.02", f"ratio(again[{TIME}], normal[{TIME}]) > 0.980392")
SLOWER = (f"ratio(slowed[{TIME}], normal[{TIME}]) < 1.00",)


def same(factor: float = 1.02) -> Pair:
    canary = Canary("same", factor)
    return make_pair(name="same", arms={"normal": FULL, "again": FULL}, checks=SAME, canary=canary)


def slower(factor: float = 3.0) -> Pair:
    arms = {"normal": FULL, "slowed": f"{FULL}-slowed"}
    return make_pair(name="slower", arms=arms, checks=SLOWER, canary=Canary("slower", factor))


def injected(factor: float = 1.02) -> Pair:
    arms = {"normal": FULL, "slowed": FULL}
    canary = Canary("injected", factor)
    return make_pair(name="injected", arms=arms, checks=SLOWER, canary=canary, reuse=True)


def judged(
    folder: Path, *pairs: Pair, seconds: Callable[[str, int], float] = lambda arm, number: 0.1
) -> dict[str, PairVerdict]:
    """Verdicts by pair, where the run of an arm takes `seconds(arm, number)` a step."""
    stems = [stem for pair in pairs for stem in pair.arms.values()]
    plan: Plan = make_plan(
        pairs=pairs,
        runs=tuple(ordered_runs(pairs, [], 1)),
        cases={stem: _named(stem) for stem in stems},
    )
    numbers: dict[tuple[str | None, str | None], int] = {}
    for run in plan.runs:
        number = numbers[run.pair, run.arm] = numbers.get((run.pair, run.arm), 0) + 1
        directory = run_directory(folder, run)
        write_run(directory, _named(run.case), run.repeat, step_time=seconds(str(run.arm), number))
    runs, verdicts = judge_suite(plan, folder, {run: Execution(DONE, NOW, 1.0) for run in plan.runs})
    assert {run.state for run in runs} == {"PASS"}
    return {verdict.name: verdict for verdict in verdicts}


def _named(stem: str) -> Case:
    return replace(make_case(FULL, ()), stem=stem)


def steady(arm: str, number: int) -> float:
    """Runs that scatter by a tenth of a percent."""
    return 0.1 * (1 + 0.001 * (number % 3)) * (3.0 if arm == "slowed" else 1.0)


def equal(arm: str, number: int) -> float:
    """Runs of equal arms: sometimes the one is faster by a little, sometimes the other."""
    return 0.1 * (1.01 if (number % 2 == 0) == (arm == "normal") else 1.0)


def test_a_working_detector_passes_every_canary(tmp_path: Path) -> None:
    verdicts = judged(tmp_path, same(), slower(), injected(), seconds=steady)
    assert {name: verdict.state for name, verdict in verdicts.items()} == {
        "same": "PASS",
        "slower": "PASS",
        "injected": "PASS",
    }
    assert verdicts["slower"].checks[0].effect.estimate == pytest.approx(3.0, rel=0.01)
    assert verdicts["slower"].checks[0].message.endswith("seen, as it must be")
    assert verdicts["injected"].checks[0].effect.estimate == pytest.approx(1.02, rel=0.002)


def test_a_slowdown_that_did_not_happen_is_a_blind_detector(tmp_path: Path) -> None:
    verdict = judged(tmp_path, slower(), seconds=equal)["slower"]
    assert verdict.state == "INCONCLUSIVE"
    assert "the detector is blind" in verdict.checks[0].message


def test_noise_that_hides_the_slowdown_is_a_blind_detector(tmp_path: Path) -> None:
    """2 % in runs that scatter by 10 %."""
    noise = {1: 1.0, 2: 1.1, 3: 0.95, 4: 1.05}
    verdicts = judged(
        tmp_path,
        same(),
        injected(),
        seconds=lambda arm, number: 0.1 * (noise[number] if arm == "again" else 1),
    )
    assert verdicts["injected"].state == "INCONCLUSIVE"
    assert "blind: it does not see a planted slowdown of 1.02" in verdicts["injected"].checks[0].message
    # It raised no false alarm all the same.
    assert verdicts["same"].state == "PASS"
    assert "no difference seen, nor ruled out" in verdicts["same"].checks[0].message


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_a_false_alarm_is_inconclusive_whichever_arm_is_slower(tmp_path: Path, factor: float) -> None:
    def seconds(arm: str, number: int) -> float:
        return steady("normal", number) * (factor if arm == "again" else 1)

    verdict = judged(tmp_path, same(), seconds=seconds)["same"]
    assert verdict.state == "INCONCLUSIVE"
    assert any("a difference of a case from itself" in check.message for check in verdict.checks)


def test_runs_that_are_lacking_stay_missing(tmp_path: Path) -> None:
    plan = make_plan(same(), cases={FULL: make_case()}, runs=tuple(ordered_runs([same()], [], 1)))
    _, (verdict,) = judge_suite(plan, tmp_path, {})
    assert verdict.state == "MISSING"
    plan = make_plan(
        same(),
        pairs=(same(), injected()),
        cases={FULL: make_case()},
        runs=tuple(ordered_runs([same()], [], 1)),
    )
    _, verdicts = judge_suite(plan, tmp_path, {})
    assert [verdict.state for verdict in verdicts] == ["MISSING", "MISSING"]


def test_the_night_is_inconclusive_and_never_red(tmp_path: Path) -> None:
    verdicts = judged(tmp_path, slower(), seconds=equal)
    night = SuiteVerdict(suite="s", started="", seconds=0, directory="", runs=[], pairs=[*verdicts.values()])
    assert night.exit_code == 5


def test_injecting_changes_no_file_of_the_run(tmp_path: Path) -> None:
    judged(tmp_path, same(), injected(), seconds=steady)
    metrics = (tmp_path / FULL / "1" / "metrics.json").read_bytes()
    judged(tmp_path / "without", same(), seconds=steady)
    assert (tmp_path / "without" / FULL / "1" / "metrics.json").read_bytes() == metrics


def test_a_canary_that_cannot_be_compared_says_why_and_nothing_of_the_detector(tmp_path: Path) -> None:
    """It lacks the metric that its check reads."""
    lacking = replace(slower(), checks=('ratio(slowed["a"], normal["a"]) < 1.00',))
    verdict = judged(tmp_path, lacking, seconds=steady)["slower"]
    assert (verdict.state, verdict.checks[0].state) == ("MISSING", "MISSING")
    assert "detector" not in verdict.checks[0].message
