# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: how many at once, on which GPUs, and that a pair's runs never are."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from lora_suite.campaign.execute import Sharing, execute
from lora_suite.campaign.side_by_side import SideBySide, gpus_needed
from lora_suite.judge.suite import Execution
from lora_suite.launch.record import Ended
from tests.campaign.helpers import FakeLauncher, console, printed, train
from tests.judge.helpers import DONE, FULL, make_case, make_pair, make_plan, planned


class Crowd:
    """Counts who is at work at once, and with which devices."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[str, tuple[str, ...]] = {}
        self.most = 0
        self.seen: dict[str, tuple[str, ...]] = {}
        self.beside: dict[str, set[str]] = {}

    def enter(self, name: str, devices: Sequence[str]) -> None:
        with self.lock:
            taken = [device for held in self.now.values() for device in held]
            assert not set(taken) & set(devices), f"{name} shares {devices}"
            self.now[name] = self.seen[name] = tuple(devices)
            self.most = max(self.most, len(self.now))
            for each in self.now:
                self.beside.setdefault(each, set()).update(self.now)

    def leave(self, name: str) -> None:
        with self.lock:
            del self.now[name]

    def work(self, run, devices, poll) -> Execution:
        self.enter(f"{run.repeat}", devices)
        time.sleep(0.02)
        self.leave(f"{run.repeat}")
        return Execution(DONE, datetime.now(UTC), 0.02)


def go(slots: int, devices: Sequence[str], needs: Sequence[int]) -> tuple[Crowd, list[int]]:
    """Run one after another what needs so many GPUs; returns who was there, and the order of their ends."""
    crowd = Crowd()
    beside = SideBySide(slots, devices, crowd.work)
    done = [
        run.repeat
        for number, gpus in enumerate(needs, 1)
        for run, _ in beside.begin(planned(FULL, number), gpus)
    ]
    done += [run.repeat for run, _ in beside.drain()]
    return crowd, done


def test_no_more_than_the_slots_at_once():
    crowd, done = go(3, (), [0] * 12)
    assert crowd.most == 3
    assert sorted(done) == list(range(1, 13))


def test_gpus_are_counted_and_each_is_one_run_s():
    crowd, done = go(8, ("g0", "g1", "g2", "g3"), [2, 2, 1, 4, 1, 3])
    assert sorted(done) == [1, 2, 3, 4, 5, 6]
    assert [len(crowd.seen[f"{number}"]) for number in range(1, 7)] == [2, 2, 1, 4, 1, 3]
    assert crowd.beside["4"] == {"4"}
    assert "2" in crowd.beside["1"]


@pytest.mark.parametrize("devices", [(), ("g0",)])
def test_what_needs_more_gpus_than_are_known_has_the_machine_to_itself(devices):
    crowd, _ = go(8, devices, [0, 0, 2, 0, 0])
    assert crowd.beside["3"] == {"3"}
    assert crowd.seen["3"] == ()


def test_cpu_processes_need_no_gpu():
    assert gpus_needed(make_case(FULL)) == 0
    assert gpus_needed(replace(make_case(FULL), stem="sft-tiny-llama-1n2g-fsdp2")) == 2


class SlowLauncher(FakeLauncher):
    """Takes a moment for a run, and counts who is there."""

    def __init__(self, crowd: Crowd, seconds: float = 0.05, stops: str = "") -> None:
        super().__init__()
        self.crowd, self.seconds, self.stops = crowd, seconds, stops

    def run(self, case, planned, run_dir, *, keep, poll) -> Ended:
        name = f"{planned.case} {planned.repeat}"
        self.crowd.enter(name, ())
        try:
            if name == self.stops:
                return Ended(how="interrupted", status=130, message="interrupted")
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                poll(None, "")
                time.sleep(0.005)
            return train(case, planned, run_dir)
        except KeyboardInterrupt:
            return Ended(how="interrupted", status=130, message="interrupted")
        finally:
            self.crowd.leave(name)


ALONE = "sft-tiny-llama-1n2c-fsdp2-alone"


def mixed_plan():
    """A pair of 4 repeats, then 6 runs of a case outside of it."""
    pair = make_pair()
    paired = make_plan(pair)
    alone = tuple(planned(ALONE, repeat) for repeat in range(1, 7))
    cases = paired.cases | {ALONE: replace(make_case(FULL), stem=ALONE)}
    return make_plan(pair, runs=paired.runs + alone, cases=cases)


def test_runs_of_pairs_have_the_machine_to_themselves(tmp_path):
    crowd = Crowd()
    launcher = SlowLauncher(crowd)
    screen = console()
    sharing = Sharing(4, (), lambda devices: launcher)
    verdict = execute(mixed_plan(), tmp_path, launcher, screen, keep=False, sharing=sharing)
    assert {run.state for run in verdict.runs} == {"PASS"}
    assert crowd.most == 4
    for name, others in crowd.beside.items():
        assert others == {name} or all(other.startswith(ALONE) for other in others), name
    lines = [line for line in printed(screen).splitlines() if "PASS" in line]
    assert [line.partition(" ")[0] for line in lines] == [f"{number}/14" for number in range(1, 15)]


def test_without_sharing_there_is_never_a_second(tmp_path):
    crowd = Crowd()
    execute(mixed_plan(), tmp_path, SlowLauncher(crowd, 0.01), console(), keep=False)
    assert crowd.most == 1


def test_an_interrupted_run_stops_those_beside_it(tmp_path):
    launcher = SlowLauncher(Crowd(), seconds=20.0, stops=f"{ALONE} 3")
    runs = tuple(planned(ALONE, repeat) for repeat in range(1, 7))
    plan = make_plan(pairs=(), runs=runs, cases={ALONE: replace(make_case(FULL), stem=ALONE)})
    sharing = Sharing(3, (), lambda devices: launcher)
    began = time.monotonic()
    verdict = execute(plan, tmp_path, launcher, console(), keep=False, sharing=sharing)
    assert time.monotonic() - began < 15.0
    assert verdict.interrupted
    assert {run.state for run in verdict.runs} == {"MISSING"}
    assert launcher.crowd.now == {}
