# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a machine, on a launcher that writes files in place of training."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from lora_suite.campaign import doctor as module
from lora_suite.campaign.doctor import doctor, smallest_effect
from lora_suite.judge.verdict import Effect
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Case, PlannedRun
from tests.campaign.helpers import Deed, FakeLauncher, console, printed, train

CASE = "sft-tiny-llama-1n2c-fsdp2"


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU, and a run takes 15 s."""
    monkeypatch.setattr(module, "_has_gpu", lambda: False)
    monkeypatch.setattr(module, "_seconds_of_a_run", lambda verdict: 15.0)


def timed(*factors: float, **damage: Any) -> FakeLauncher:
    """Runs of 0.1 s a step, times the factor of their number (0: the one that warms the machine)."""

    def deed(case: Case, planned: PlannedRun, run_dir: Path) -> Ended:
        return train(case, planned, run_dir, steps=30, step_time=0.1 * factors[planned.repeat], **damage)

    deeds: dict[tuple[str, int], Deed] = {(CASE, number): deed for number in range(len(factors))}
    return FakeLauncher(deeds)


def examined(launcher: FakeLauncher, folder: Path, minutes: float = 2.0) -> tuple[int, list[str]]:
    """Exit code and lines."""
    screen = console()
    return doctor(minutes, folder, launcher, screen), printed(screen).splitlines()


def test_a_steady_machine_is_fit_for_timing_gates(tmp_path: Path) -> None:
    launcher = timed(3.0, 1.0, 1.001, 1.001, 1.0, 1.0, 1.002, 1.0, 1.0)
    code, lines = examined(launcher, tmp_path)
    assert code == 0
    assert lines[-2].startswith("timing gates make sense here, for effects above 0.")
    # Two minutes less the first run, in pairs of runs of 15 s: three, made even.
    assert [repeat for _, repeat in launcher.ran] == [0, 1, 2, 3, 4]
    assert any(
        line.startswith("one case against itself, 2 repeats of 30 steps: ratio 1.00") for line in lines
    )


def test_a_noisy_machine_is_not(tmp_path: Path) -> None:
    launcher = timed(1.0, 1.0, 1.06, 1.1, 0.97, 1.0, 1.08, 1.05, 0.98, 1.0)
    code, lines = examined(launcher, tmp_path, minutes=2.3)
    assert code == 5
    (said,) = [line for line in lines if line.startswith("timing gates below")]
    # In ABBA BAAB order the other arm has runs 2, 3, 5 and 8.
    ratios = (1.06 / 1.0, 1.1 / 0.97, 1.0 / 1.08, 0.98 / 1.05)
    spread = statistics.stdev(map(math.log, ratios))
    quantiles = stats.t.ppf(0.975, 7) + stats.t.ppf(0.8, 7)
    expected = math.expm1(quantiles * spread / math.sqrt(8))
    assert said == f"timing gates below {expected:.1%} make no sense here: the same case scatters that much"


def test_a_machine_on_which_a_case_differs_from_itself_is_not(tmp_path: Path) -> None:
    """The other arm, with runs 2, 3, 5 and 8, is 10 % slower, with hardly any scatter."""
    launcher = timed(1.0, 1.0, 1.1, 1.101, 1.0, 1.1, 1.0, 1.001, 1.1)
    code, lines = examined(launcher, tmp_path, minutes=2.3)
    assert code == 5
    assert "timing gates make no sense here: a case differs from itself" in lines


def test_the_more_time_the_more_repeats_up_to_the_last_look(tmp_path: Path) -> None:
    ran = {}
    for minutes in (0.1, 3.0, 60.0):
        launcher = timed(*[1.0 + number / 1000 for number in range(17)])
        examined(launcher, tmp_path / str(minutes), minutes)
        ran[minutes] = len(launcher.ran) - 1
    assert ran == {0.1: 4, 3.0: 8, 60.0: 16}


def test_versions_device_and_health_are_printed(tmp_path: Path) -> None:
    def hot(metrics: dict[str, Any], record: dict[str, Any]) -> None:
        record["environment"] = {
            "strict": {"device": "Some CPU", "torch": "2.13.0", "cuda": None},
            "soft": {"cpus": 2},
        }
        record["health"] = {"before": {"load_average": [9.5, 1, 1]}}

    launcher = timed(*[1.0 + number / 1000 for number in range(5)], damage=hot)
    _, lines = examined(launcher, tmp_path)
    assert any(line.startswith("jq: jq-") for line in lines)
    assert any(line.startswith("torch ") and "transformers" in line for line in lines)
    assert "device Some CPU, torch 2.13.0" in lines
    assert "health, run 1: load average 9.5 on 2 cores" in lines


def test_a_program_that_is_lacking_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAMS", ("no-such-program",))
    _, lines = examined(timed(*[1.0 + number / 1000 for number in range(5)]), tmp_path)
    assert "no-such-program: MISSING" in lines


@pytest.mark.parametrize("number", [0, 3])
def test_a_run_that_breaks_is_what_the_exit_code_says(tmp_path: Path, number: int) -> None:
    launcher = timed(*[1.0 + each / 1000 for each in range(5)])
    crash = Ended(how="oom", status=1, message="out of memory on rank 0")
    launcher.deeds[CASE, number] = lambda case, planned, run_dir: crash
    code, lines = examined(launcher, tmp_path)
    assert code == 3
    assert any("out of memory on rank 0" in line for line in lines)


def test_an_interrupt_is_one(tmp_path: Path) -> None:
    def interrupts(case: Case, planned: PlannedRun, run_dir: Path) -> Ended:
        raise KeyboardInterrupt

    launcher = timed(*[1.0 + each / 1000 for each in range(5)])
    launcher.deeds[CASE, 4] = interrupts
    assert examined(launcher, tmp_path)[0] == 130


def test_the_smallest_effect_is_that_of_the_paired_t_test() -> None:
    ratios = [1.01, 0.99, 1.02, 1.0]
    effect = Effect(
        estimate=1, low=1, high=1, confidence=0.95, repeats=4, smallest_detectable=None, ratios=ratios
    )
    spread = statistics.stdev(map(math.log, ratios))
    expected = (stats.t.ppf(0.975, 3) + stats.t.ppf(0.8, 3)) * spread / 2
    assert smallest_effect(effect, 4) == pytest.approx(math.expm1(expected))


def test_a_gpu_gets_a_case_that_keeps_it_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_gpu", lambda: True)
    (case,) = module._plan().cases.values()
    assert isinstance(case, Case)
    assert case.recipe.policy.init == "random"
    assert case.stem == "sft-llama3.2-1b-1n1g-fsdp2"
    assert case.recipe.policy.train_micro_batch_size == 4


@pytest.mark.slow
@pytest.mark.train
def test_this_machine_gets_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five real trainings; whether the answer is yes or no depends on who else is busy here."""
    monkeypatch.undo()
    screen = console()
    code = doctor(0.1, tmp_path, console=screen)
    assert code in (0, 5), printed(screen)
    assert "one case against itself, 2 repeats of 30 steps" in printed(screen)
