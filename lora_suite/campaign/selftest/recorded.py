# SPDX-License-Identifier: Apache-2.0
"""The same questions on recorded series of real trainings, with changes planted in them.

The package ships no recordings. A folder with them has

    mlperf_v5.1_lora/*.json           one file a system: {"runs": {id: {"time_ms": [...]}}}, a time every ten
                                      steps; from mlcommons/training_results_v5.1, llama2_70b_lora
    automodel_gemma3n_pair/           full.json and lora.json, {metric: {step: value}}; from the golden values
                                      of NVIDIA-NeMo/Automodel, gemma3n with full fine-tuning and with PEFT
    megatron_goldens/*.json           {metric: {step: value}} with "iteration-time" and "lm loss"; from the
                                      golden values of NVIDIA/Megatron-LM
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from check_metrics import MetricsError, Series, load_metrics
from lora_suite.campaign.selftest.pairs import RATIO, WARMUP, pair_form
from lora_suite.campaign.selftest.row import Row, share_row
from lora_suite.campaign.selftest.traces import FULL, LORA, Values, evidence, slow_start
from lora_suite.config.errors import ConfigError
from lora_suite.judge.block import Block
from lora_suite.judge.curves import compare_curves
from lora_suite.judge.evidence import Evidence
from lora_suite.judge.matching import match_steps
from lora_suite.judge.pair_check import judge_pair_check
from lora_suite.judge.ratio import Method, sides_of
from lora_suite.judge.statistics import moved, robust_prior
from lora_suite.judge.steady import NotSteady, warmup_of
from lora_suite.judge.verdict import Effect
from lora_suite.plan.metric_names import STEP_TIME, TOTAL_STEP_TIME, VALID_TOKENS

MLPERF, AUTOMODEL, MEGATRON = "mlperf_v5.1_lora", "automodel_gemma3n_pair", "megatron_goldens"
MINIMUM_EFFECT = 0.005
_PLANTED = 0.01
_WINDOW = 4


def recorded_rows(data: Path | None) -> list[Row]:
    """The rows on recordings in a folder; rows that say why, where there are none.

    Raises ConfigError for a folder that is not there and a recording that is not what it should be.
    """
    if data is not None and not data.is_dir():
        raise ConfigError(f"{data}: no such folder; name one with recordings (--data, LORA_SUITE_DATA)")
    rows: list[Row] = []
    for folder, what, make in (
        (MLPERF, "MLPerf 5.1 LoRA logs, 1 % slower", _mlperf),
        (AUTOMODEL, "Automodel's gemma3n pair", _automodel),
        (MEGATRON, "Megatron-LM's golden runs", _megatron),
    ):
        files = sorted((data / folder).glob("*.json")) if data is not None else []
        if not files:
            where = f"{data / folder} holds none" if data is not None else "no folder given with --data"
            rows.append(Row(what, "recordings", "not measured", where, None))
            continue
        try:
            rows += make(files)
        except (MetricsError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{files[0].parent}: not the recordings that are expected: {error}") from error
    return rows


@dataclass(frozen=True)
class _Judged:
    """A window of four runs of a system, judged as one ABBA."""

    system: str
    first: int
    effect: Effect


def _mlperf(files: Sequence[Path]) -> Iterator[Row]:
    systems = {path.stem: _system(path) for path in files}
    trials = sum(len(runs) - _WINDOW + 1 for runs in systems.values())
    where = f"{len(systems)} systems, all windows of 4 consecutive runs, prior of the system's other runs"
    for planted, what, required in (
        (
            0.0,
            "MLPerf 5.1 LoRA logs, ABBA of 4 runs, 0.5 % minimum effect: called slower or faster",
            "≤ 3 %",
        ),
        (_PLANTED, "the same, 1 % slower planted in two of the four: found", "≥ 95 %"),
    ):
        judged = [each for name, runs in systems.items() for each in _windows(name, runs, planted)]
        hits = [
            each
            for each in judged
            if (said := moved(each.effect, MINIMUM_EFFECT)) == "slower" or (planted == 0.0 and said != "no")
        ]
        odd = hits if planted == 0.0 else [each for each in judged if each not in hits]
        named = "".join(f"; not as it should be: {each.system} runs {each.first} on" for each in odd[:3])
        row = share_row(
            what,
            required,
            len(hits),
            trials,
            (lambda share: share >= 0.95) if planted else (lambda share: share <= 0.03),
        )
        yield Row(row.what, row.required, row.measured, f"{row.notes}; {where}{named}", row.ok)


def _system(path: Path) -> list[Evidence]:
    """Runs of a system in the order in which they were made, as step times of ten steps each."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    if len(runs) < _WINDOW:
        raise ValueError(f"{path.name} has {len(runs)} runs, and {_WINDOW} are a window")
    times = [[after - before for before, after in pairwise(run["time_ms"])] for run in runs.values()]
    return [_timed(run) for run in times]


def _windows(name: str, runs: Sequence[Evidence], planted: float) -> Iterator[_Judged]:
    """Every ABBA of four consecutive runs: blocks (1, 2) and (4, 3), the second of each the slower arm.

    The prior's differences are those of neighbouring runs outside the window, so that what is judged is not
    its own yardstick. The runs' batches differ, so that medians are compared.
    """
    for first in range(len(runs) - _WINDOW + 1):
        window = range(first, first + _WINDOW)
        outside = [
            _log_ratio(runs[place + 1], runs[place])
            for place in range(len(runs) - 1)
            if place not in window and place + 1 not in window
        ]
        a, b, c, d = (runs[place] for place in window)
        blocks = [
            Block(1, {FULL: a, LORA: _slower(b, planted)}),
            Block(2, {FULL: d, LORA: _slower(c, planted)}),
        ]
        prior = robust_prior(outside, f"other runs of {name}")
        check = judge_pair_check(RATIO, blocks, Method(WARMUP, matched=False, priors={RATIO: prior}))
        if check.effect is None:
            raise ValueError(f"{name}: {check.message}")
        yield _Judged(name, first + 1, check.effect)


def _log_ratio(left: Evidence, right: Evidence) -> float:
    ours, theirs = (statistics.median(run.measured(STEP_TIME, WARMUP).values()) for run in (left, right))
    return math.log(ours / theirs)


def _automodel(files: Sequence[Path]) -> Iterator[Row]:
    """One full and one PEFT training of one recipe; equal numbers of tokens a step match their steps."""
    arms = {}
    for arm in (LORA, FULL):
        series = load_metrics(files[0].with_name(f"{arm}.json"))
        run = evidence(np.asarray(series[TOTAL_STEP_TIME].values))
        arms[arm] = replace(
            run,
            metrics={**run.metrics, VALID_TOKENS: series["train/tokens"]},
            record=run.record.model_copy(update={"dialect": "automodel"}),
        )
    block = Block(1, arms)
    matching = match_steps([block])
    slower = math.expm1(sides_of(pair_form(), block, Method(WARMUP, matching.steps)).log_ratio)
    matched = matching.steps and matching.difference is None
    yield Row(
        "Automodel's gemma3n pair, steps matched: LoRA slower by",
        "3 to 4.5 %",
        f"{100 * slower:.2f} %",
        "one run of each arm, 100 steps, equal numbers of tokens at every step"
        if matched
        else f"steps are not matched: {matching.difference or matching.note}",
        matched and 0.03 <= slower <= 0.045,
    )


def _megatron(files: Sequence[Path]) -> Iterator[Row]:
    recorded = [load_metrics(path) for path in files]
    times = [np.asarray(each["iteration-time"].finite_part().values) for each in recorded]
    yield share_row(
        "Megatron-LM's golden runs: called not steady",
        "0 %",
        sum(not _steady(each) for each in times),
        len(times),
        lambda share: share == 0.0,
    )
    yield share_row(
        "the same, the first 60 % of the steps 50 % longer: called not steady",
        "≥ 95 %",
        sum(not _steady(each * np.exp(slow_start(0.6, 1.5)(len(each)))) for each in times),
        len(times),
        lambda share: share >= 0.95,
    )
    losses = [by_step(each["lm loss"].finite_part()) for each in recorded]
    yield share_row(
        "Megatron-LM's golden losses, a steady 1e-3 planted: called apart",
        "100 %",
        sum(
            compare_curves({step: value * 1.001 for step, value in each.items()}, each).state == "FAIL"
            for each in losses
        ),
        len(losses),
        lambda share: share == 1.0,
    )


def by_step(series: Series) -> dict[int, float]:
    """Values by step."""
    return dict(zip(series.steps, series.values, strict=True))


def _steady(times: Values) -> bool:
    try:
        warmup_of(evidence(times), WARMUP)
    except NotSteady:
        return False
    return True


def _timed(times: Sequence[float]) -> Evidence:
    return evidence(np.asarray(times, dtype=np.float64))


def _slower(run: Evidence, share: float) -> Evidence:
    return evidence(np.asarray(run.metrics[STEP_TIME].values) * (1.0 + share))
