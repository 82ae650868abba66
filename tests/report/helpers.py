# SPDX-License-Identifier: Apache-2.0
"""Verdicts made by hand, in the size of the smoke suite: four cases of four runs, three pairs."""

from __future__ import annotations

from typing import Any

from lora_suite.judge.verdict import (
    CheckVerdict,
    Effect,
    PairCheckVerdict,
    PairVerdict,
    RunVerdict,
    SuiteVerdict,
)

CASES = (
    "sft-tiny-llama-1n2c-fsdp2",
    "sft-tiny-llama-1n2c-fsdp2-lora",
    "sft-tiny-llama-1n2c-megatron-tp2",
    "sft-tiny-llama-1n2c-megatron-tp2-lora",
)
RATIO = 'ratio(lora["timing/train/step_time"], full["timing/train/step_time"]) < 2.0'
SAME = 'max_rel_diff(dtensor["{}"], megatron["{}"]) < 1e-4'


def check(state: str = "PASS", **changes: Any) -> CheckVerdict:
    """A verdict of one check."""
    settings: dict[str, Any] = {"kind": "check", "name": 'last(data["train/loss"]) < 2', "value": "1.5"}
    return CheckVerdict(**settings | {"state": state} | changes)


def run(case: str = CASES[0], repeat: int = 1, **changes: Any) -> RunVerdict:
    """A run that passed."""
    settings: dict[str, Any] = {
        "case": case,
        "repeat": repeat,
        "pair": None,
        "arm": None,
        "state": "PASS",
        "steps_done": 30,
        "steps_planned": 30,
        "seconds": 8.25,
        "directory": f"results/{case}/{repeat}",
        "summary": {"final_loss": 1.23456, "median_step_time": 0.1034, "peak_memory_gib": 0.5},
        "checks": [check()],
    }
    return RunVerdict(**settings | changes)


def pair(name: str = "fsdp2", state: str = "PASS", **changes: Any) -> PairVerdict:
    """A pair with one ratio."""
    effect = Effect(
        estimate=0.9312, low=0.8801, high=0.9853, confidence=0.95, repeats=4, smallest_detectable=0.0754
    )
    ratio = PairCheckVerdict(
        expression=RATIO, state=state, operator="<", limit=2.0, effect=effect, value="0.9312"
    )
    settings: dict[str, Any] = {
        "name": name,
        "arms": {"full": CASES[0], "lora": CASES[1]},
        "state": state,
        "checks": [ratio],
    }
    return PairVerdict(**settings | changes)


def curves() -> PairVerdict:
    """The cross-backend pair: two checks on curves."""
    checks = [
        PairCheckVerdict(
            expression=SAME.format(metric, metric),
            state="PASS",
            operator="<",
            limit=1e-4,
            value="3.2104567890123e-07",
        )
        for metric in ("train/loss", "validation/loss")
    ]
    return pair("backends", arms={"dtensor": CASES[0], "megatron": CASES[2]}, checks=checks)


def suite(**changes: Any) -> SuiteVerdict:
    """The smoke suite, all PASS."""
    settings: dict[str, Any] = {
        "suite": "smoke",
        "started": "2026-03-01T12:00:00+00:00",
        "seconds": 192.4,
        "directory": "results/smoke/20260301-120000-0a1b2c",
        "runs": [run(case, repeat) for case in CASES for repeat in range(1, 5)],
        "pairs": [pair("fsdp2"), pair("megatron"), curves()],
    }
    return SuiteVerdict(**settings | changes)
