# SPDX-License-Identifier: Apache-2.0
"""Pairs of runs that are what they should be, or harmed in one way, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lora_suite.judge.pair import judge_pair
from lora_suite.judge.run import judge_run
from lora_suite.judge.verdict import PairVerdict, RunVerdict
from lora_suite.plan.model import Pair
from tests.judge.helpers import DONE, FULL, LORA, Damage, make_case, make_pair, planned, write_run

FULL_TIMES = (0.100, 0.102, 0.099, 0.101)
LORA_TIMES = (0.070, 0.0705, 0.0695, 0.070)
SAME_LOSS = 'max_rel_diff(full["train/loss"], lora["train/loss"]) < 1e-3'

Harm = Callable[[str, int], Damage | None]


def no_harm(arm: str, repeat: int) -> Damage | None:
    """Leave every run as it is."""
    return None


def only(arm: str, repeat: int, damage: Damage) -> Harm:
    """Damage one run."""
    return lambda each, number: damage if (each, number) == (arm, repeat) else None


def every(arm: str, damage: Damage) -> Harm:
    """Damage all runs of an arm."""
    return lambda each, number: damage if each == arm else None


def runs(
    tmp_path: Path,
    harm: Harm = no_harm,
    full: Sequence[float] = FULL_TIMES,
    lora: Sequence[float] = LORA_TIMES,
) -> dict[str, list[RunVerdict]]:
    """Write and judge the runs of both arms, one for each step time."""
    judged: dict[str, list[RunVerdict]] = {}
    for arm, stem, times in (("full", FULL, full), ("lora", LORA, lora)):
        case = make_case(stem)
        for repeat, step_time in enumerate(times, 1):
            run_dir = tmp_path / stem / str(repeat)
            write_run(run_dir, case, repeat, step_time=step_time, damage=harm(arm, repeat))
            verdict = judge_run(case, planned(stem, repeat, "fsdp2", arm), run_dir, DONE)
            judged.setdefault(arm, []).append(verdict)
    return judged


def judged(tmp_path: Path, harm: Harm = no_harm, pair: Pair | None = None, **times: Any) -> PairVerdict:
    """Write the runs of a pair and judge it."""
    return judge_pair(pair or make_pair(), runs(tmp_path, harm, **times))


def ratio(operator: str, limit: float, metric: str = "timing/train/step_time") -> Pair:
    """The pair with one check on a ratio."""
    return make_pair(checks=(f'ratio(lora["{metric}"], full["{metric}"]) {operator} {limit}',))
