# SPDX-License-Identifier: Apache-2.0
"""The shipped speed suites from plan to exit code, with trainings that take the time they are told to."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lora_suite.blueprint import preflight
from lora_suite.campaign.request import Request
from lora_suite.campaign.run import run_suite
from lora_suite.judge.verdict import PairVerdict, SuiteVerdict
from lora_suite.launch.external import run_external
from lora_suite.launch.record import Ended
from lora_suite.plan import load_plan
from lora_suite.plan.model import Case, ExternalCase, PlannedRun
from lora_suite.train.backends.dtensor.fast.build import refusal as dtensor_refusal
from lora_suite.train.backends.megatron.fast.build import refusal as megatron_refusal
from lora_suite.train.data.load import load_data
from tests.campaign.helpers import FakeLauncher, console, printed
from tests.judge.helpers import DONE, ROOT, write_run

H200 = "NVIDIA H200"
# Milliseconds of a step, as a suite should find them.
GOOD = {
    "sft-llama3.2-1b-1n1g-fsdp2": 40.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora": 25.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 28.0,
    "public-peft-1b-1x2048": 35.0,
    "sft-llama3.2-1b-1n1g-fsdp2-4x2048": 135.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-4x2048": 93.0,
    "sft-llama3.2-1b-1n1g-fsdp2-lora-peft-4x2048": 104.0,
    "public-peft-1b-4x2048": 112.0,
    "sft-llama3.2-1b-1n1g-megatron": 43.0,
    "sft-llama3.2-1b-1n1g-megatron-lora": 29.0,
    "sft-llama3.1-8b-1n1g-fsdp2": 390.0,
    "sft-llama3.1-8b-1n1g-fsdp2-lora": 248.0,
    "sft-llama3.1-8b-1n1g-fsdp2-lora-r128": 258.0,
    "sft-llama3.1-8b-1n1g-fsdp2-lora-peft": 262.0,
    "public-peft-8b-1x4096": 275.0,
    "sft-llama3.1-8b-1n2g-fsdp2": 370.0,
    "sft-llama3.1-8b-1n2g-fsdp2-lora": 252.0,
}


SUITES = sorted(path.stem for path in (ROOT / "suites").glob("speed_*.yaml"))
# What torch says that an H200 has.
MEMORY = 150_110_011_392
# A program that leaves what it is given.
LEAVE = """
import pathlib, sys
pathlib.Path("out").mkdir()
pathlib.Path("out/metrics.json").write_text(sys.argv[1])
"""


@dataclass(frozen=True)
class Step:
    """How long a step takes, and its size over all ranks."""

    seconds: float
    slots: int
    tokens: int


class Trainings(FakeLauncher):
    """Runs of the shipped cases on one machine. times: milliseconds of a case's step.

    device: its name. fast: whether the fast path is taken. loss: of the public trainer, at every step.
    """

    def __init__(
        self, times: Mapping[str, float], *, device: str = H200, fast: bool = True, loss: float = 5.0
    ) -> None:
        super().__init__({})
        self._times, self._device, self._fast, self._loss = {**GOOD, **times}, device, fast, loss

    def run(
        self,
        case: Case | ExternalCase,
        planned: PlannedRun,
        run_dir: Path,
        *,
        keep: bool,
        poll: Callable[..., None],
    ) -> Ended:
        """Run it; repeats scatter by half a percent."""
        self.ran.append((planned.case, planned.repeat))
        scatter = 1.0 + 0.005 * (planned.repeat % 2)
        if isinstance(case, ExternalCase):
            return self._external(case, planned, run_dir, self._times[case.stem] / 1000 * scatter)
        work = self.work(case)

        def damage(metrics: dict[str, Any], record: dict[str, Any]) -> None:
            steps = list(metrics["train/loss"])

            def series(value: Callable[[Step], float]) -> dict[str, float]:
                return {step: value(each) for step, each in zip(steps, work, strict=True)}

            def rate(amount: Callable[[Step], int]) -> dict[str, float]:
                return series(lambda step: amount(step) / (step.seconds * scatter) / case.gpus)

            metrics["timing/train/step_time"] = series(lambda step: step.seconds * scatter)
            metrics["performance/slots_per_sec_per_gpu"] = rate(lambda step: step.slots)
            metrics["performance/tokens_per_sec_per_gpu"] = rate(lambda step: step.tokens)
            metrics["memory/peak_allocated_gib"] = series(lambda step: 2.6)
            metrics["ray/node.0.gpu.0.mem_gb"] = {"1": 20.0, "2": 21.0}
            if case.lora:
                metrics["lora/grad_coverage"] = series(lambda step: 1.0)
            reason = "" if self._fast else "there is no GPU"
            record["fast_path"] = {"taken": self._fast, "reason": reason, "required": True}
            record["environment"]["strict"].update(device=self._device, world_size=case.gpus)
            rows = f"{case.recipe.data.train.data_path} {case.recipe.policy.train_global_batch_size}"
            record["batches"] = {step: f"{rows} {step}" for step in steps}

        write_run(run_dir, case, planned.repeat, steps=case.steps, damage=damage)
        return DONE

    def _external(self, case: ExternalCase, planned: PlannedRun, run_dir: Path, seconds: float) -> Ended:
        """Another trainer's run, as the launcher brings it into the shape of ours."""
        steps = [str(step) for step in range(1, case.steps + 1)]
        metrics = {
            "train/loss": dict.fromkeys(steps, self._loss),
            "timing/train/total_step_time": dict.fromkeys(steps, seconds),
        }
        cwd = run_dir.parent / "public"
        cwd.mkdir(parents=True, exist_ok=True)
        fake = dataclasses.replace(
            case, command=(sys.executable, "-SIc", LEAVE, json.dumps(metrics)), cwd=cwd, overrides=()
        )
        run_id = f"{case.stem}-{planned.repeat}"
        return run_external(fake, run_dir, run_id, lambda *told: None)

    def work(self, case: Case) -> Sequence[Step]:
        """What each step of a run does."""
        policy = case.recipe.policy
        slots = policy.train_global_batch_size * policy.max_total_sequence_length
        return [Step(self._times[case.stem] / 1000, slots, slots)] * case.steps


class BoundBySlots(Trainings):
    """Runs on the rows of their cases, in which every slot takes as long, whether or not it holds a token."""

    def work(self, case: Case) -> Sequence[Step]:
        """What the rows of each step are cut into."""
        data = load_data(case.recipe, case.recipe_path)
        slots = [(data.slicing.slots(batch, 1), batch.tokens) for batch in data.steps]
        return [Step(12e-6 * number, number, tokens) for number, tokens in slots]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, SuiteVerdict, Trainings]]:
    """Run two repeats of a shipped suite; returns exit code, verdict and what ran."""

    def runs(
        name: str,
        select: str,
        times: Mapping[str, float] | None = None,
        *,
        overrides: tuple[str, ...] = (),
        kind: type[Trainings] = Trainings,
        **machine: Any,
    ) -> tuple[int, SuiteVerdict, Trainings]:
        trainings = kind(times or {}, **machine)
        screen = console()
        suite = ROOT / "suites" / f"{name}.yaml"
        request = Request(suite=suite, results=tmp_path, select=select, repeats=2, overrides=overrides)
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


def test_all_arms_run_interleaved_once_a_repeat_and_serve_two_pairs(run) -> None:
    code, verdict, trainings = run("speed_llama_1b_1n1g", "dtensor-1x2048")
    assert code == 0, verdict
    measured = [case for case, repeat in trainings.ran if repeat > 0]
    assert Counter(measured) == {
        "sft-llama3.2-1b-1n1g-fsdp2": 2,
        "sft-llama3.2-1b-1n1g-fsdp2-lora": 2,
        "sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 2,
        "public-peft-1b-1x2048": 2,
    }
    assert measured == measured[::-1]
    public, own = verdict.pairs
    assert estimates(public) == [35 / 25]
    assert estimates(own) == [25 / 40, 28 / 25]
    # What the public trainer sees must not cost the other arms their matched steps.
    assert any("different batches" in note for note in public.notes)
    assert not any("not matched" in note or "weak evidence" in note for note in own.notes)


def test_without_the_public_trainer_the_pair_makes_its_runs_itself(run) -> None:
    code, verdict, trainings = run("speed_llama_1b_1n1g", "dtensor-1x2048 and not public")
    assert code == 0, verdict
    assert not any(case.startswith("public") for case, _ in trainings.ran)
    (own,) = verdict.pairs
    assert estimates(own) == [25 / 40, 28 / 25]


@pytest.mark.parametrize(("factor", "code"), [(1.02, 0), (0.98, 1)])
@pytest.mark.parametrize(
    ("name", "select", "public", "limit"),
    [
        ("speed_llama_1b_1n1g", "dtensor-1x2048", "public-peft-1b-1x2048", 25 * 1.30),
        ("speed_llama_1b_1n1g", "dtensor-4x2048", "public-peft-1b-4x2048", 93 * 1.15),
        ("speed_llama_8b_1n1g", "dtensor", "public-peft-8b-1x4096", 248 * 1.08),
    ],
)
def test_public_tools_must_be_slower_by_so_much(run, name, select, public, limit, factor, code) -> None:
    found, verdict, _ = run(name, select, {public: factor * limit})
    assert found == code, verdict
    assert [pair.state for pair in verdict.pairs] == ["PASS" if code == 0 else "FAIL", "PASS"]


def test_a_public_trainer_that_learns_nothing_is_no_measure(run) -> None:
    """A captured step that does not do its work is fast."""
    code, verdict, _ = run("speed_llama_1b_1n1g", "dtensor-1x2048", loss=12.2)
    assert code == 1
    failed = {each.case for each in verdict.runs if each.state == "FAIL"}
    assert failed == {"public-peft-1b-1x2048"}


@pytest.mark.parametrize(
    ("times", "states"),
    [
        ({"sft-llama3.2-1b-1n1g-fsdp2-lora": 26.0, "sft-llama3.2-1b-1n1g-fsdp2": 36.0}, ["FAIL", "PASS"]),
        ({"sft-llama3.2-1b-1n1g-fsdp2-lora-peft": 26.0}, ["PASS", "FAIL"]),
    ],
)
def test_a_ratio_beyond_its_limit_fails_the_suite(run, times: dict[str, float], states: list[str]) -> None:
    code, verdict, _ = run("speed_llama_1b_1n1g", "dtensor-1x2048 and not public", times)
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
    code, verdict, _ = run("speed_llama_1b_1n1g", "dtensor-1x2048 and not public", slow)
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
    # Slots a GPU: one row of 4096 in `two` against one in 248 ms.
    assert estimates(scaling) == [round(248 / two, 3)]
    assert estimates(parallel) == [round(two / 370, 3)]
    assert not any("not matched" in note for note in parallel.notes)


@pytest.mark.parametrize("select", ["dtensor", "megatron"])
def test_a_token_of_packed_rows_takes_as_long_whether_they_are_long_or_short(run, select: str) -> None:
    code, verdict, _ = run("speed_packing_1b_1n1g", select, kind=BoundBySlots)
    assert code == 0, verdict
    (pair,) = verdict.pairs
    longer, shorter = estimates(pair)
    # Of the slots of packed rows 96 % hold a token where rows are short, 97 % where they are long.
    assert 0.97 < longer < 1.0
    assert longer * shorter == pytest.approx(1.0, abs=2e-3)


def test_padding_makes_a_token_of_long_rows_take_longer(run) -> None:
    """Rows padded to the longest of four: what makes a trainer slow on long-tailed chat and fine on SQuAD."""
    padded = ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=4")
    code, verdict, _ = run("speed_packing_1b_1n1g", "dtensor", kind=BoundBySlots, overrides=padded)
    assert code == 1
    (pair,) = verdict.pairs
    assert [check.state for check in pair.checks] == ["FAIL", "PASS"]
    longer, _ = estimates(pair)
    assert 1.5 < longer < 1.8


@pytest.mark.parametrize("suite", SUITES)
def test_no_case_asks_for_what_its_fast_path_refuses_on_an_h200(suite: str) -> None:
    refused, unasked = {}, set()
    plan = load_plan(ROOT / "suites" / f"{suite}.yaml")
    for stem, case in plan.cases.items():
        if isinstance(case, ExternalCase):
            continue
        assert isinstance(case, Case)
        if not case.recipe.policy.require_fast_path:
            unasked.add(stem)
        blueprint = preflight(case.recipe, case.recipe_path)
        if case.recipe.policy.backend == "dtensor":
            refused[stem] = dtensor_refusal(case.recipe, blueprint, MEMORY)
        else:
            refused[stem] = megatron_refusal(case.recipe, blueprint)
    refusals = {stem for stem, reason in refused.items() if reason is not None}
    assert refusals <= unasked
    # The path is left open only where an arm has no fast one.
    needs = [stems for pair in plan.pairs if refusals & (stems := set(pair.arms.values()))]
    assert unasked == set().union(*needs)
