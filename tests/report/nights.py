# SPDX-License-Identifier: Apache-2.0
"""A night in full: a verdict with everything that a report can draw, in the size of a real suite.

Pairs of 50-step runs whose steps drift and spike, a slowdown planted in the LoRA arm of the first pair, 60
nights of history with a change in it, a crash with its log, a machine that throttled.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from lora_suite.judge.verdict import (
    Attribution,
    CaseHistory,
    ChangePoint,
    CheckVerdict,
    Effect,
    MatchedSteps,
    Night,
    PairCheckVerdict,
    PairVerdict,
    PhaseDelta,
    Points,
    RunVerdict,
    SuiteVerdict,
)

STEP_TIME = "timing/train/step_time"
RATIO = f'ratio(lora["{STEP_TIME}"], full["{STEP_TIME}"]) < 0.80'
LOSS_CHECK = 'data["train/loss"]["50"] < 0.8'
SLOW_CHECK = f'mean(data["{STEP_TIME}"], 2) < 0.30'
PHASES = {"data": 0.01, "forward_backward": 0.72, "grad_sync": 0.12, "optimizer": 0.15}
MODELS = ("llama3.1-8b", "llama3.2-1b", "qwen3-0.6b", "nanov3-30ba3b", "gemma3n-e4b")
LAYOUTS = ("1n8g-fsdp2", "1n8g-fsdp2tp2", "1n8g-megatron-tp2")
SHARED = "8f2c41d9"
BAD = "c03d5e7a"


def night(
    pairs: int = 15, repeats: int = 4, steps: int = 50, nights: int = 60, seed: int = 7
) -> SuiteVerdict:
    """`pairs` pairs of a full and a LoRA case; the first LoRA case is slow, the last full case crashed."""
    chance = random.Random(seed)
    stems = [f"sft-{model}-{layout}" for model in MODELS for layout in LAYOUTS][:pairs]
    runs: list[RunVerdict] = []
    judged: list[PairVerdict] = []
    history: list[CaseHistory] = []
    for number, stem in enumerate(stems):
        slow = number == 0
        crash = number == len(stems) - 1 and pairs > 1
        full = [_run(chance, stem, "full", repeat, steps, 0.32) for repeat in range(1, repeats + 1)]
        lora = [
            _run(chance, f"{stem}-lora", "lora", repeat, steps, 0.27 if slow else 0.22, slow=slow)
            for repeat in range(1, repeats + 1)
        ]
        if crash:
            full[1] = _crashed(full[1])
        runs += full + lora
        judged.append(_pair(stem, full, lora, slow, crash))
        history += [
            _history(chance, stem, 0.32, nights, None),
            _history(chance, f"{stem}-lora", 0.22, nights, slow),
        ]
    return SuiteVerdict(
        suite="nightly",
        started="2026-03-01T03:00:00+00:00",
        seconds=5412.0,
        directory="results/nightly/20260301-030000-0a1b2c",
        runs=runs,
        pairs=judged,
        history=history,
        command="lora-suite run suites/nightly.yaml policy.init=random",
        environments={"5f1c2a90": {"device": "NVIDIA H200", "world_size": "8", "torch": "2.11.0+cu130"}},
    )


def _steps(chance: random.Random, typical: float, steps: int) -> list[float]:
    """Step times in s: a slow start, noise of 1 %, one spike."""
    values = [typical * math.exp(chance.gauss(0, 0.01)) for _ in range(steps)]
    values[:3] = [typical * 20, typical * 1.6, typical * 1.1]
    values[chance.randrange(steps // 2, steps)] *= 1.5
    return [round(value, 5) for value in values]


def _run(
    chance: random.Random, case: str, arm: str, repeat: int, steps: int, typical: float, slow: bool = False
) -> RunVerdict:
    at = [float(step) for step in range(1, steps + 1)]
    times = _steps(chance, typical, steps)
    loss = [round(0.7 + 5 * math.exp(-step / 9) + (0.05 if arm == "lora" else 0), 5) for step in at]
    clock = [5.0 * tick for tick in range(40)]
    memory = [round((62 if arm == "full" else 31) * min(1, 0.2 + tick / 12), 3) for tick in range(40)]
    state = "FAIL" if slow else "PASS"
    checks = [
        CheckVerdict(
            kind="check",
            name=LOSS_CHECK,
            state="PASS",
            value=str(loss[-1]),
            margin_percent=4.0,
            source=f"scripts/{case}.sh:5",
        ),
        CheckVerdict(
            kind="check",
            name=SLOW_CHECK,
            state=state,
            value="0.5871" if slow else f"{typical * 1.4:.4f}",
            message="misses its limit by 95.7 %" if slow else "",
            source=f"scripts/{case}.sh:6",
        ),
    ]
    if arm == "lora":
        checks.append(
            CheckVerdict(
                kind="invariant", name="frozen_unchanged", state="PASS", message="every bit as at the start"
            )
        )
    share = {**PHASES, "optimizer": PHASES["optimizer"] + 0.227} if slow else PHASES
    base = 0.22 if slow else typical
    return RunVerdict(
        case=case,
        repeat=repeat,
        pair=case.removesuffix("-lora"),
        arm=arm,
        state=state,
        run_id=f"{case}-{repeat}",
        directory=f"results/nightly/20260301-030000-0a1b2c/{case}/{repeat}",
        steps_done=steps,
        steps_planned=steps,
        seconds=88.0 + repeat,
        checks=checks,
        summary={
            "final_loss": loss[-1],
            "median_step_time": statistics.median(times[3:]),
            "floor_time": 0.14,
            "peak_memory_gib": max(memory),
        },
        phases={name: round(base * part, 5) for name, part in share.items()},
        series={
            "train/loss": Points(at=at, values=loss),
            STEP_TIME: Points(at=at, values=times),
            "ray/node.0.gpu.0.mem_gb": Points(at=clock, values=memory),
            "ray/node.0.gpu.1.mem_gb": Points(at=clock, values=[value * 0.98 for value in memory]),
        },
        health=["GPU 3 was throttled for heat in 12 of 40 samples"] if slow and repeat == 2 else [],
        environment="5f1c2a90",
        code=BAD,
    )


def _crashed(run: RunVerdict) -> RunVerdict:
    log = [
        "Traceback (most recent call last):",
        '  File "train.py", line 88, in step',
        "torch.OutOfMemoryError: CUDA out of memory",
    ]
    return RunVerdict(
        case=run.case,
        repeat=run.repeat,
        pair=run.pair,
        arm=run.arm,
        state="ERROR",
        own_state="ERROR",
        message="out of memory: rank 3, step 17\n  " + "\n  ".join(log),
        steps_done=16,
        steps_planned=run.steps_planned,
        seconds=41.0,
        directory=run.directory,
        environment=run.environment,
        code=run.code,
    )


def _pair(
    stem: str, full: Sequence[RunVerdict], lora: Sequence[RunVerdict], slow: bool, crash: bool
) -> PairVerdict:
    matched = []
    for left, right in zip(lora, full, strict=True):
        if STEP_TIME in right.series:
            ours, theirs = left.series[STEP_TIME], right.series[STEP_TIME]
            matched.append(
                MatchedSteps(
                    repeat=left.repeat,
                    steps=[int(step) for step in ours.at],
                    left=ours.values,
                    right=theirs.values,
                    trimmed=[1, 2, 3],
                )
            )
    ratios = [
        statistics.median(ours / theirs for ours, theirs in zip(each.left[3:], each.right[3:], strict=True))
        for each in matched
    ]
    middle, spread = statistics.fmean(ratios), 3.18 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    effect = Effect(
        estimate=middle,
        low=middle - spread,
        high=middle + spread,
        confidence=0.95,
        repeats=len(ratios),
        smallest_detectable=0.011,
        ratios=ratios,
        method="paired t with a prior of 12 degrees of freedom",
    )
    state = "FAIL" if slow else "PASS"
    told = f"{middle:.4f} [{effect.low:.4f}, {effect.high:.4f}]"
    check = PairCheckVerdict(
        expression=RATIO,
        state=state,
        operator="<",
        limit=0.8,
        effect=effect,
        value=told,
        message=f"{told} is beyond the limit < 0.8" if slow else "",
        matched=matched,
    )
    own = "MISSING" if crash else "PASS"
    return PairVerdict(
        name=stem.removeprefix("sft-"),
        arms={"full": stem, "lora": f"{stem}-lora"},
        checks=[check],
        state="MISSING" if crash else state,
        own_state=own,
        message="full run 2: ERROR out of memory: rank 3, step 17" if crash else "",
        attribution=_attribution() if slow else None,
    )


def _attribution() -> Attribution:
    def moved(by: float) -> Effect:
        return Effect(
            estimate=1 + by,
            low=1 + by - 0.006,
            high=1 + by + 0.006,
            confidence=0.95,
            repeats=4,
            smallest_detectable=0.01,
        )

    return Attribution(
        moved="lora-only",
        reference="the baseline of 2026-02-20",
        changes={"full": moved(0.001), "lora": moved(0.227)},
        double_ratio=moved(0.226),
        phases=[
            PhaseDelta(
                phase=name, left=0.22 * part, right=0.22 * (part + (0.227 if name == "optimizer" else 0))
            )
            for name, part in PHASES.items()
        ],
    )


def _history(
    chance: random.Random, case: str, typical: float, nights: int, changed: bool | None
) -> CaseHistory:
    first = nights - 6
    values = [
        typical * math.exp(chance.gauss(0, 0.005)) * (1.227 if changed and index >= first else 1)
        for index in range(nights)
    ]
    known = [
        Night(
            started=f"2026-{1 + index // 28:02d}-{1 + index % 28:02d}T03:00:00+00:00",
            value=value,
            run_id=f"{case}-{index}",
            code=BAD if index >= first else SHARED,
        )
        for index, value in enumerate(values)
    ]
    if not changed:
        return CaseHistory(case=case, metric=STEP_TIME, environment="5f1c2a90", nights=known)
    change = ChangePoint(
        at=first,
        first_bad=known[first],
        last_good=known[first - 1],
        ratio=1.227,
        detectors=["segmentation", "drift test"],
    )
    return CaseHistory(
        case=case,
        metric=STEP_TIME,
        environment="5f1c2a90",
        nights=known,
        changes=[change],
        alert="above the control limit: +22.9 % since 6 runs",
    )
