# SPDX-License-Identifier: Apache-2.0
"""The shipped speed suites from plan to exit code, with trainings that take the time they are told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_suite.campaign.request import Request
from lora_suite.campaign.run import run_suite
from lora_suite.judge.verdict import PairVerdict, SuiteVerdict
from lora_suite.launch.record import Ended
from lora_suite.plan.model import Case, PlannedRun
from tests.campaign.helpers import FakeLauncher, console, printed
from tests.judge.helpers import DONE, ROOT, write_run

H200 = "NVIDIA H200"
# Milliseconds of a step, as a suite should find them.
GOOD = {
    "sft-llama3.2-1b-1n1g-fsdp2": 40.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora": 25.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 36.0,
    "sft-llama3.2-1b-1n1g-fsdp2-4x2048": 135.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-4x2048": 93.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-peft-4x2048": 112.0,
    "sft-llama3.2-1b-1n1g-megatron": 43.0,
    "sft-llama3.2-1b-1n1g-megatron-lora": 29.0,
    "sft-llama3.1-8b-1n1g-fsdp2-lora": 249.0,
    "sft-llama3.1-8b-1n2g-fsdp2": 370.0,
    "sft-llama3.1-8b-1n2g-fsdp2-lora": 252.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-packed": 600.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-packed-long": 860.0,
}
# Tokens and slots of a step that every GPU had a share of.
TOKENS = {"short": 59_000, "long": 81_000}


class Trainings(FakeLauncher):
    """Runs of the shipped cases on one machine. times: milliseconds of a case's step.

    device: its name. fast: whether the fast path is taken.
    """

    def __init__(self, times: Mapping[str, float], *, device: str = H200, fast: bool = True) -> None:
        super().__init__({})
        self._times, self._device, self._fast = {**GOOD, **times}, device, fast

    def run(
        self, case: Case, planned: PlannedRun, run_dir: Path, *, keep: bool, poll: Callable[..., None]
    ) -> Ended:
        """Run it; repeats scatter by half a percent."""
        self.ran.append((planned.case, planned.repeat))
        seconds = self._times[case.stem] / 1000 * (1.0 + 0.005 * (planned.repeat % 2))
        long = case.recipe.data.train.data_path == "data/long-chat.jsonl"

        def damage(metrics: dict[str, Any], record: dict[str, Any]) -> None:
            steps = list(metrics["train/loss"])

            def constant(value: float) -> dict[str, float]:
                return dict.fromkeys(steps, value)

            policy = case.recipe.policy
            slots = policy.train_global_batch_size * policy.max_total_sequence_length
            metrics["performance/slots_per_sec_per_gpu"] = constant(slots / seconds / case.gpus)
            metrics["performance/tokens_per_sec_per_gpu"] = constant(
                TOKENS["long" if long else "short"] / seconds / case.gpus
            )
            metrics["memory/peak_allocated_gib"] = constant(2.6)
            metrics["ray/node.0.gpu.0.mem_gb"] = {"1": 20.0, "2": 21.0}
            if case.lora:
                metrics["lora/grad_coverage"] = constant(1.0)
            record["fast_path"] = {
                "taken": self._fast,
                "reason": "" if self._fast else "no GPU",
                "required": True,
            }
            strict = record["environment"]["strict"]
            strict.update(device=self._device, world_size=case.gpus)
            record["batches"] = {
                step: f"{case.recipe.data.train.data_path} {policy.train_global_batch_size} {step}"
                for step in steps
            }

        write_run(run_dir, case, planned.repeat, step_time=seconds, steps=case.steps, damage=damage)
        return DONE


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, SuiteVerdict, Trainings]]:
    """Run two repeats of a shipped suite; returns exit code, verdict and what ran."""

    def runs(
        name: str, select: str, times: Mapping[str, float] | None = None, **machine: Any
    ) -> tuple[int, SuiteVerdict, Trainings]:
        trainings = Trainings(times or {}, **machine)
        screen = console()
        request = Request(suite=ROOT / "suites" / f"{name}.yaml", results=tmp_path, select=select, repeats=2)
        code = run_suite(request, trainings, screen)
        (folder,) = (tmp_path / name).iterdir()
        assert str(folder) in printed(screen).replace("\n", "")
        return code, SuiteVerdict.model_validate_json((folder / "verdict.json").read_text()), trainings

    return runs


def estimates(pair: PairVerdict) -> list[float | None]:
    """The ratio that each check of a pair found, but for tails."""
    return [
        round(check.effect.estimate, 3) if check.effect else None
        for check in pair.checks
        if not check.expression.startswith("tail_ratio")
    ]


def test_three_arms_are_one_pair_of_which_each_runs_once_a_repeat(run) -> None:
    code, verdict, trainings = run("speed_llama_1b_1n1g", "dtensor-1x2048")
    assert code == 0, verdict
    measured = [case for case, repeat in trainings.ran if repeat > 0]
    assert Counter(measured) == {
        "sft-llama3.2-1b-1n1g-fsdp2": 2,
        "sft-llama3.2-1b-1n1g-fsdp2-lora": 2,
        "sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 2,
    }
    assert measured == measured[::-1]
    (pair,) = verdict.pairs
    assert estimates(pair) == [25 / 40, 36 / 25]


@pytest.mark.parametrize(
    ("times", "states"),
    [
        ({"sft-llama3.2-1b-1n1g-fsdp2-lora": 26.0, "sft-llama3.2-1b-1n1g-fsdp2": 36.0}, ["FAIL", "PASS"]),
        ({"sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 31.0}, ["PASS", "FAIL"]),
    ],
)
def test_a_ratio_beyond_its_limit_fails_the_suite(run, times: dict[str, float], states: list[str]) -> None:
    code, verdict, _ = run("speed_llama_1b_1n1g", "dtensor-1x2048", times)
    assert code == 1
    (pair,) = verdict.pairs
    assert [check.state for check in pair.checks[:2]] == states
    assert all(each.state == "PASS" for each in verdict.runs)


def test_step_time_and_memory_have_limits_on_an_h200(run) -> None:
    slow = {
        "sft-llama3.2-1b-1n1g-fsdp2-lora": 28.0,
        "sft-llama3.2-1b-1n1g-fsdp2": 50.0,
        "sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 50.0,
    }
    code, verdict, _ = run("speed_llama_1b_1n1g", "dtensor-1x2048", slow)
    assert code == 1
    failed = {
        (each.case, check.name) for each in verdict.runs for check in each.checks if check.state == "FAIL"
    }
    limit = 'median(data["timing/train/step_time"], 11) <= 0.027'
    assert failed == {("sft-llama3.2-1b-1n1g-fsdp2-lora", limit)}
    assert verdict.pairs[0].own_state == "PASS"


def test_on_another_gpu_nobody_knows_the_limits(run) -> None:
    code, verdict, _ = run("speed_llama_1b_1n1g", "megatron", device="NVIDIA A100-SXM4-80GB")
    assert code == 5
    assert {each.case: each.state for each in verdict.runs} == {
        "sft-llama3.2-1b-1n1g-megatron": "PASS",
        "sft-llama3.2-1b-1n1g-megatron-lora": "INCONCLUSIVE",
    }


def test_a_slow_path_fails_however_fast_it_is(run) -> None:
    code, verdict, _ = run("speed_llama_1b_1n1g", "dtensor-4x2048", fast=False)
    assert code == 1
    assert {check.state for each in verdict.runs for check in each.checks if check.name == "fast_path"} == {
        "FAIL"
    }


@pytest.mark.parametrize(("two", "code"), [(252.0, 0), (270.0, 1)])
def test_two_gpus_are_compared_with_one_and_with_each_other(run, two: float, code: int) -> None:
    found, verdict, trainings = run(
        "speed_llama_8b_1n2g", "scaling or data-parallel", {"sft-llama3.1-8b-1n2g-fsdp2-lora": two}
    )
    assert found == code, verdict
    assert Counter(case for case, repeat in trainings.ran if repeat > 0) == {
        "sft-llama3.1-8b-1n1g-fsdp2-lora": 2,
        "sft-llama3.1-8b-1n2g-fsdp2-lora": 2,
        "sft-llama3.1-8b-1n2g-fsdp2": 2,
    }
    scaling, parallel = verdict.pairs
    # Slots a GPU: one row of 4096 in `two` against one in 249 ms.
    assert estimates(scaling) == [round(249 / two, 3)]
    assert estimates(parallel) == [round(two / 370, 3)]
    assert not any("not matched" in note for note in parallel.notes)


@pytest.mark.parametrize(("long", "code"), [(860.0, 0), (990.0, 1)])
def test_a_token_of_long_rows_takes_as_long_as_one_of_short_rows(run, long: float, code: int) -> None:
    found, verdict, _ = run(
        "speed_packing_1b_1n1g", "dtensor", {"sft-llama3.2-1b-1n1g-fsdp2-lora-packed-long": long}
    )
    assert found == code, verdict
    (pair,) = verdict.pairs
    times_longer = (long / TOKENS["long"]) / (600.0 / TOKENS["short"])
    assert estimates(pair) == [round(times_longer, 3), round(1 / times_longer, 3)]
