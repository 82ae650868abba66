# SPDX-License-Identifier: Apache-2.0
"""What a comparison with a reference finds: which arm moved, whether the loss or the memory did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from lora_suite.campaign.selftest.row import Row, share_row
from lora_suite.judge.attribution import attribute
from lora_suite.judge.curves import compare_curves, compare_levels
from lora_suite.judge.memory import compare_peaks

_SEEDS, _FEW_SEEDS = 2000, 300
_REPEATS = 4
# What is planted in the LoRA arm and in the full arm tonight.
_PLANTED = {
    "lora-only": (0.03, 0.0),
    "shared": (0.03, 0.03),
    "full-only": (0.0, -0.03),
    "none": (0.0, 0.0),
}
_NO_CLAIM = "unclear"


def reference_rows(full: bool) -> list[Row]:
    """The rows about comparisons with a reference; `full` uses more seeds."""
    seeds = _SEEDS if full else _FEW_SEEDS
    return [*_attribution(seeds), *_curves(seeds), *_levels(seeds), *_memory(seeds)]


def _attribution(seeds: int) -> Iterator[Row]:
    """Four repeats of both arms tonight and of the reference; run noise 0.2 %, block 0.3 %."""
    generator = np.random.default_rng(2)
    confusion = {
        kind: Counter(_moved(generator, lora, full) for _ in range(seeds))
        for kind, (lora, full) in _PLANTED.items()
    }
    right = sum(counts[kind] for kind, counts in confusion.items())
    unclear = sum(counts[_NO_CLAIM] for counts in confusion.values())
    trials = seeds * len(_PLANTED)
    table = "; ".join(
        f"{kind}: {', '.join(f'{said} {n}' for said, n in counts.most_common())}"
        for kind, counts in confusion.items()
    )
    yield share_row(
        "attribution, 3 % planted in LoRA, both, full (faster), none; run noise 0.2 %: right",
        "≥ 95 %",
        right,
        trials,
        lambda share: share >= 0.95,
    )
    wrong = share_row(
        "the same: a wrong answer rather than `unclear`",
        "≤ 1 %",
        trials - right - unclear,
        trials,
        lambda share: share <= 0.01,
    )
    yield Row(wrong.what, wrong.required, wrong.measured, f"{wrong.notes}; {table}", wrong.ok)


def _moved(generator: np.random.Generator, lora: float, full: float) -> str:
    reference = _arms(generator, 0.0, 0.0)
    tonight = _arms(generator, math.log1p(lora), math.log1p(full))
    return attribute(tonight, reference, lora="lora", full="full", source="earlier").moved


def _arms(generator: np.random.Generator, lora: float, full: float) -> dict[str, Sequence[float]]:
    block = generator.normal(0.0, 0.003, _REPEATS)
    return {
        arm: (block + planted + generator.normal(0.0, 0.002, _REPEATS)).tolist()
        for arm, planted in (("lora", lora), ("full", full))
    }


def _curves(seeds: int) -> Iterator[Row]:
    """A falling loss of 50 steps against itself, with numerics and with faults in it."""
    generator = np.random.default_rng(3)
    steps = np.arange(1, 51)
    curve = 1.5 + 2.0 * np.exp(-steps / 15)

    def apart(jitter: float, offset: float, spike: float) -> bool:
        walk = np.cumsum(generator.normal(0.0, jitter / math.sqrt(len(steps)), len(steps)))
        planted = np.zeros(len(steps))
        planted[generator.integers(len(steps))] = spike
        new = curve * (1.0 + walk + offset + planted)
        ours, theirs = (dict(enumerate(values.tolist(), 1)) for values in (new, curve))
        return compare_curves(ours, theirs).tier == "apart"

    for what, jitter, offset, spike in (
        ("loss drifts by numerics of 1e-4: called apart", 1e-4, 0.0, 0.0),
        ("loss is off by a steady 1e-3: called apart", 1e-4, 1e-3, 0.0),
        ("loss is off by 1 % at one step: called apart", 1e-4, 0.0, 1e-2),
    ):
        faulty = offset != 0.0 or spike != 0.0
        yield share_row(
            what,
            "≥ 99 %" if faulty else "≤ 1 %",
            sum(apart(jitter, offset, spike) for _ in range(seeds)),
            seeds,
            (lambda share: share >= 0.99) if faulty else (lambda share: share <= 0.01),
        )


def _levels(seeds: int) -> Iterator[Row]:
    """Five new seeds against five of the reference, level 0.3 % from seed to seed, steps 3 %."""
    generator = np.random.default_rng(4)

    def fails(planted: float) -> bool:
        new, reference = (
            [
                dict(enumerate((level * (1 + generator.normal(0.0, 0.03, 40))).tolist(), 1))
                for level in 1.5 * (1 + shift + generator.normal(0.0, 0.003, 5))
            ]
            for shift in (planted, 0.0)
        )
        return compare_levels(new, reference).state == "FAIL"

    yield share_row(
        "loss of five other seeds: called different",
        "≤ 5 %",
        sum(fails(0.0) for _ in range(seeds)),
        seeds,
        lambda share: share <= 0.05,
    )
    yield share_row(
        "loss of five other seeds, 3 % higher: found",
        "≥ 95 %",
        sum(fails(0.03) for _ in range(seeds)),
        seeds,
        lambda share: share >= 0.95,
    )


def _memory(seeds: int) -> Iterator[Row]:
    generator = np.random.default_rng(5)
    peaks = generator.uniform(4.0, 140.0, seeds)
    block = 1 / 512
    whole = np.round(peaks / block) * block
    grown = sum(compare_peaks(1.01 * peak, peak).state == "FAIL" for peak in peaks)
    yield share_row(
        "peak memory 1 % higher, one run each: found", "100 %", grown, seeds, lambda share: share == 1.0
    )
    jitter = generator.uniform(-0.49, 0.49, seeds) * block
    changed = sum(compare_peaks(a + b, a).kind != "equal" for a, b in zip(whole, jitter, strict=True))
    yield share_row(
        "peak memory within half a block of 2 MiB: called changed",
        "0 %",
        changed,
        seeds,
        lambda share: share == 0.0,
    )
