# SPDX-License-Identifier: Apache-2.0
"""What a pair's verdict calls noise and what it finds, on seeded traces, through the judge itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from check_metrics import PairForm, parse
from lora_suite.campaign.selftest.row import Row, share_row
from lora_suite.campaign.selftest.traces import (
    FULL,
    LORA,
    QUIET,
    Machine,
    blocks,
    every_tenth,
    nothing,
    slow_start,
    slower,
)
from lora_suite.judge.block import Block
from lora_suite.judge.looks import confidence_of_look, judge_look
from lora_suite.judge.pair_check import judge_pair_check
from lora_suite.judge.ratio import Method
from lora_suite.judge.statistics import (
    contrasts,
    detectable_log_effect,
    log_effect,
    moved,
    robust_prior,
)
from lora_suite.judge.tail import tail_checks
from lora_suite.judge.verdict import PairCheckVerdict, PairVerdict
from lora_suite.plan.metric_names import STEP_TIME
from lora_suite.plan.order import looks_up_to

RATIO = f'ratio({LORA}["{STEP_TIME}"], {FULL}["{STEP_TIME}"]) < 1.00'
PAIRS = 4
WARMUP = 3
_SEEDS, _FEW_SEEDS = 2000, 200
_NIGHTS = 20

_MACHINES = {
    "drift of 0.3 % a run": replace(Machine(), drift=0.003),
    "step scatter correlated by 0.8": replace(Machine(), correlation=0.8),
    "spikes in 20 % of the steps": replace(Machine(), spikes=0.2),
    "host with two levels, 3 % apart": replace(Machine(), host=0.03),
    "step scatter of 5 %": replace(Machine(), noise=0.05),
}


def pair_rows(full: bool) -> list[Row]:
    """The rows about one pair; `full` adds machines and uses more seeds."""
    seeds = _SEEDS if full else _FEW_SEEDS
    return [
        *_false_positives(full),
        _slowdown(seeds),
        _smallest_detectable(_SEEDS),
        *_prior(_SEEDS),
        *_looks(seeds),
        *_warmup(seeds),
        *_tail(seeds),
    ]


def pair_form() -> PairForm:
    """The pair check as the judge reads it."""
    form = parse(RATIO).pair
    assert form is not None
    return form


def _judged(text: str, given: Sequence[Block]) -> PairCheckVerdict:
    return judge_pair_check(text, given, Method(WARMUP))


def _differs(check: PairCheckVerdict) -> bool:
    """Whether the arms are called different, either way."""
    return check.effect is not None and moved(check.effect, 0.0) != "no"


def _count(seeds: int, happens: Callable[[int], bool]) -> int:
    return sum(happens(seed) for seed in range(seeds))


def _false_positives(full: bool) -> Iterator[Row]:
    machines = {"spikes, warm-up, correlated steps": Machine()} | (_MACHINES if full else {})
    for name, machine in machines.items():
        given = (blocks(seed, PAIRS, machine) for seed in range(_SEEDS))
        yield share_row(
            f"no difference (A/A), {PAIRS} pairs, {name}: called different",
            "≤ 6 %",
            sum(_differs(_judged(RATIO, each)) for each in given),
            _SEEDS,
            lambda share: share <= 0.06,
        )


def _slowdown(seeds: int) -> Row:
    spreads = []

    def found(seed: int) -> bool:
        check = _judged(RATIO, blocks(seed, PAIRS, QUIET, slower(0.02)))
        assert check.effect is not None
        spreads.append(statistics.variance(map(math.log, check.effect.ratios)))
        return check.state == "FAIL"

    row = share_row(
        f"LoRA 2 % slower, {PAIRS} pairs, pair noise 0.5 %: found",
        "≥ 95 %",
        _count(seeds, found),
        seeds,
        lambda share: share >= 0.95,
    )
    noise = 100 * math.sqrt(statistics.fmean(spreads))
    return replace(row, notes=f"{row.notes}; pair noise as measured {noise:.2f} %")


def _smallest_detectable(seeds: int) -> Row:
    generator = np.random.default_rng(0)
    spread = 0.005
    planted = detectable_log_effect(spread, PAIRS)

    def found(_: int) -> bool:
        return log_effect(generator.normal(planted, spread, PAIRS).tolist()).low > 0

    return share_row(
        f"the smallest detectable effect itself ({100 * math.expm1(planted):.2f} %): found",
        "76 to 84 %",
        _count(seeds, found),
        seeds,
        lambda share: 0.76 <= share <= 0.84,
    )


def _prior(seeds: int) -> Iterator[Row]:
    """Three pairs and a prior from twenty earlier nights, pair noise 1 %."""
    generator = np.random.default_rng(1)
    spread, repeats = 0.01, 3

    def effect_low_high(planted: float) -> tuple[float, float]:
        nights = generator.normal(0.0, spread, (_NIGHTS, repeats))
        prior = robust_prior([each for night in nights.tolist() for each in contrasts(night)], "20 nights")
        effect = log_effect(generator.normal(planted, spread, repeats).tolist(), prior)
        return effect.low, effect.high

    def wrong(_: int) -> bool:
        low, high = effect_low_high(0.0)
        return low > 0 or high < 0

    yield share_row(
        f"A/A, {repeats} pairs, prior of {_NIGHTS} nights: called different",
        "≤ 6 %",
        _count(seeds, wrong),
        seeds,
        lambda share: share <= 0.06,
    )
    yield share_row(
        f"LoRA 3 % slower, {repeats} pairs, pair noise 1 %, prior of {_NIGHTS} nights: found",
        "≥ 95 %",
        _count(seeds, lambda _: effect_low_high(math.log1p(0.03))[0] > 0),
        seeds,
        lambda share: share >= 0.95,
    )


def _looks(seeds: int) -> Iterator[Row]:
    for planted, what, required, holds in (
        (0.0, "A/A, looks after 2, 4, 6, 8 pairs: called different at any", "≤ 6 %", lambda s: s <= 0.06),
        (0.03, "LoRA 3 % slower, looks after 2, 4, 6, 8 pairs: found", "≥ 95 %", lambda s: s >= 0.95),
    ):
        ends = [_looked(seed, Machine(), planted) for seed in range(seeds)]
        hits = sum(state != "INCONCLUSIVE" if planted == 0 else state == "FAIL" for state, _ in ends)
        row = share_row(what, required, hits, seeds, holds)
        pairs = statistics.fmean(pairs for _, pairs in ends)
        yield replace(row, notes=f"{row.notes}; {pairs:.1f} pairs run on average")


def _looked(seed: int, machine: Machine, planted: float) -> tuple[str, int]:
    """Run pairs until a look decides; return the state and the pairs that were run."""
    looks = looks_up_to(None)
    given = blocks(seed, looks[-1], machine, slower(planted) if planted else nothing)
    for number, pairs in enumerate(looks, 1):
        method = Method(WARMUP, confidence=confidence_of_look(number, len(looks)))
        check = judge_pair_check(RATIO, given[:pairs], method)
        verdict = PairVerdict(name="pair", arms={}, state=check.state, checks=[check])
        if judge_look(verdict, number, len(looks)).state != "go on":
            break
    return check.state, pairs


def _warmup(seeds: int) -> Iterator[Row]:
    """Slow starts of the LoRA arm alone, which the floor of 10 % does not cover."""
    compiled = slow_start(0.35, 3.0)
    yield share_row(
        "LoRA arm three times slower in its first 35 % of steps, else equal: called different",
        "≤ 6 %",
        _count(seeds, lambda seed: _differs(_judged(RATIO, blocks(seed, PAIRS, Machine(), compiled)))),
        seeds,
        lambda share: share <= 0.06,
    )
    never = slow_start(0.6, 1.3)
    yield share_row(
        "LoRA arm 30 % slower in its first 60 % of steps: INCONCLUSIVE, not steady",
        "≥ 99 %",
        _count(
            seeds,
            lambda seed: "not steady" in _judged(RATIO, blocks(seed, PAIRS, Machine(), never)).message,
        ),
        seeds,
        lambda share: share >= 0.99,
    )
    noisy = replace(Machine(), noise=0.05)
    yield share_row(
        "steady runs, step scatter of 5 %: called not steady",
        "≤ 1 %",
        _count(seeds, lambda seed: "not steady" in _judged(RATIO, blocks(seed, PAIRS, noisy)).message),
        seeds,
        lambda share: share <= 0.01,
    )


def _tail(seeds: int) -> Iterator[Row]:
    (gate,) = tail_checks([RATIO])
    missed_by_median = 0

    def fails(seed: int, factor: float) -> bool:
        nonlocal missed_by_median
        given = blocks(seed, PAIRS, Machine(), every_tenth(factor) if factor > 1 else nothing)
        missed_by_median += not _differs(_judged(RATIO, given))
        return _judged(gate, given).state == "FAIL"

    row = share_row(
        "every tenth LoRA step three times longer: tail gate fails",
        "≥ 95 %",
        _count(seeds, lambda seed: fails(seed, 3.0)),
        seeds,
        lambda share: share >= 0.95,
    )
    hidden = 100 * missed_by_median / seeds
    yield replace(row, notes=f"{row.notes}; the median saw no difference in {hidden:.1f} %")
    yield share_row(
        "no tail, spikes in 3 % of the steps of both arms: tail gate fails",
        "≤ 1 %",
        _count(seeds, lambda seed: fails(seed, 1.0)),
        seeds,
        lambda share: share <= 0.01,
    )
