# SPDX-License-Identifier: Apache-2.0
"""Night after night: false alerts, creep and steps through the monitor that `trend` uses, and a real series.

Every series is replayed as it would have happened: each night is judged on the nights before it alone.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lora_suite.campaign.selftest.row import Row, share_row
from lora_suite.history.levels import change_points
from lora_suite.history.metrics import Policy, policy_of
from lora_suite.history.monitor import Signal, watch
from lora_suite.plan.metric_names import STEP_TIME

DATA = "LORA_SUITE_DATA"
"""Environment variable that names the folder of recorded series."""

NOISE = 0.005
CORRELATION = 0.3
_NULL_NIGHTS = 60
_STABLE_NIGHTS = 20
_CREEP, _CREEP_NIGHTS = 0.001, 25
_STEPS = (0.01, 0.02, 0.03)
_STEP_AT, _STEP_NIGHTS, _NIGHTS_FOR_STEP = 30, 30, 10
_NEAR = 2
_SEEDS_NULL, _SEEDS_CREEP, _SEEDS_STEP, _SEEDS_TOLD = 2000, 500, 300, 500
_QUICK = 5
_KNOWN = "tigerbeetle_throughput.json"
_TOLD = "told"

_TIME = policy_of(STEP_TIME)
_THROUGHPUT = policy_of("performance/tokens_per_sec_per_gpu")

Nights = NDArray[np.float64]


@dataclass(frozen=True)
class _Found:
    """An alert. delay: nights until then, 1 for the first. error: nights that it names too late."""

    delay: int
    error: int


def night_rows(full: bool, data: Path | None = None) -> list[Row]:
    """All rows; without `full` on a fifth of the seeds. data: folder of recorded series, by default $DATA."""
    share = 1 if full else _QUICK
    rows = [_creep_row(_SEEDS_CREEP // share), _null_row(_SEEDS_NULL // share)]
    rows += [_step_row(size, _SEEDS_STEP // share) for size in _STEPS]
    if full:
        rows += _told_rows()
    return [*rows, *_known_rows(data or Path(os.environ.get(DATA, "")))]


def scatter(seed: int, nights: int, noise: float = NOISE, correlation: float = CORRELATION) -> Nights:
    """Logarithms of stationary nights: AR(1) whose values have the standard deviation `noise`."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(nights) * noise
    own = np.sqrt(1 - correlation**2)
    for night in range(1, nights):
        values[night] = correlation * values[night - 1] + own * values[night]
    return values


def creep(nights: int) -> Nights:
    """Logarithms of a level that rises by 0.1 % of the first a night."""
    risen: Nights = np.log1p(_CREEP * np.arange(1, nights + 1))
    return risen


def signals(logs: Nights, policy: Policy = _TIME) -> list[Signal | None]:
    """What each night gives rise to."""
    return watch(np.exp(logs).tolist(), policy).signals


def found_after(logs: Nights, change: int) -> _Found | None:
    """The first alert that the series is worse since `change`, None where none came or one came before."""
    alerts = [(night, each) for night, each in enumerate(signals(logs)) if each is not None]
    if not alerts or alerts[0][0] < change or not alerts[0][1].worse:
        return None
    night, signal = alerts[0]
    return _Found(night - change + 1, signal.first - change)


def _creep_row(seeds: int, stable: int = _STABLE_NIGHTS) -> Row:
    found = [_crept(seed, stable) for seed in range(seeds)]
    named = [each for each in found if each is not None and each.delay <= _CREEP_NIGHTS and each.error >= 0]
    row = share_row(
        f"creep of 0.1 % a night after {stable} nights, night noise 0.5 %",
        "named within 25 nights in ≥ 95 %",
        len(named),
        seeds,
        lambda share: share >= 0.95,
    )
    return _with_delays(row, named)


def _crept(seed: int, stable: int) -> _Found | None:
    logs = scatter(seed, stable + _CREEP_NIGHTS, correlation=0.0)
    logs[stable:] += creep(_CREEP_NIGHTS)
    return found_after(logs, stable)


def _null_row(seeds: int) -> Row:
    return share_row(
        "60 nights of noise 0.5 % (autocorrelation 0.3), no change: ever alerted",
        "≤ 5 % of series",
        _alerted(seeds, _NULL_NIGHTS, NOISE, CORRELATION),
        seeds,
        lambda share: share <= 0.05,
    )


def _alerted(seeds: int, nights: int, noise: float, correlation: float) -> int:
    """Series without a change in which any night was called better or worse."""
    return sum(any(signals(scatter(10_000 + seed, nights, noise, correlation))) for seed in range(seeds))


def _step_row(size: float, seeds: int) -> Row:
    found = []
    for seed in range(seeds):
        logs = scatter(20_000 + seed, _STEP_AT + _STEP_NIGHTS, correlation=0.0)
        logs[_STEP_AT:] += np.log1p(size)
        found.append(found_after(logs, _STEP_AT))
    there = [each for each in found if each is not None]
    near = [each for each in there if each.delay <= _NIGHTS_FOR_STEP and abs(each.error) <= _NEAR]
    # A step as small as what is called a change at all is only told.
    required = size > _TIME.smallest
    row = share_row(
        f"step of {100 * size:g} % after {_STEP_AT} nights, night noise 0.5 %",
        f"named within {_NIGHTS_FOR_STEP} nights, to {_NEAR} nights, in ≥ 95 %" if required else _TOLD,
        len(near),
        seeds,
        (lambda share: share >= 0.95) if required else (lambda share: True),
    )
    return _with_delays(row, there)


def _with_delays(row: Row, found: list[_Found]) -> Row:
    if not found:
        return row
    delays = sorted(each.delay for each in found)
    errors = sorted(each.error for each in found)
    late = delays[int(0.95 * (len(delays) - 1))]
    low, high = errors[int(0.05 * (len(errors) - 1))], errors[int(0.95 * (len(errors) - 1))]
    notes = (
        f"{row.notes}; delay {statistics.median(delays):g} nights, 95 % {late}; first bad night off by "
        f"{statistics.median(errors):g} ({low} to {high})"
    )
    return Row(row.what, row.required, row.measured, notes, row.ok)


def _told_rows() -> Iterator[Row]:
    """What is not required: other noise, more correlation, a year, and a creep from the first night on."""
    situations = (
        (60, 0.02, CORRELATION, "60 nights of noise 2 % (autocorrelation 0.3), no change: ever alerted"),
        (60, NOISE, 0.6, "60 nights of noise 0.5 % (autocorrelation 0.6), no change: ever alerted"),
        (365, NOISE, CORRELATION, "365 nights of noise 0.5 % (autocorrelation 0.3), no change: ever alerted"),
    )
    for nights, noise, correlation, what in situations:
        hits = _alerted(_SEEDS_TOLD, nights, noise, correlation)
        yield share_row(what, _TOLD, hits, _SEEDS_TOLD, lambda share: True)
    from_start = _creep_row(_SEEDS_TOLD, stable=0)
    yield Row(from_start.what, _TOLD, from_start.measured, from_start.notes, True)


def _known_rows(data: Path) -> Iterator[Row]:
    """The two known change points of a recorded series of nightly throughput."""
    what = "365 nights of TigerBeetle's throughput: change points 15 and 71 (apache/otava, Apache-2.0)"
    required = "both, by replay and by the whole series, to 1 night"
    path = data / _KNOWN
    if not path.is_file():
        yield Row(what, required, "-", f"not measured: set {DATA} to a folder with {_KNOWN}", None)
        return
    document = json.loads(path.read_text(encoding="utf-8"))
    values, known = document["values"], document["known_change_points_default_settings"]
    replayed = replay(values, _THROUGHPUT)
    levels = change_points(values, _THROUGHPUT)
    both = [
        point for point in known if all(any(abs(at - point) <= 1 for at in way) for way in (replayed, levels))
    ]
    yield Row(
        what,
        required,
        f"{len(both)} of {len(known)}",
        f"replay named {_list(replayed)}; the whole series {_list(levels)}",
        len(both) == len(known),
    )


def replay(values: list[float], policy: Policy) -> list[int]:
    """First nights of the levels that a team would have named: each regression answered when five nights old.

    Better levels become the reference by themselves.
    """
    answered: list[int] = []
    while True:
        watched = watch(values, policy, answered)
        first = next(_confirmed(watched.signals, lambda at: at not in answered), None)
        if first is None:
            return sorted([*answered, *watched.accepted])
        answered.append(first)


def _confirmed(found: list[Signal | None], new: Callable[[int], bool]) -> Iterator[int]:
    for night, signal in enumerate(found):
        if signal is not None and signal.worse and night - signal.first >= 4 and new(signal.first):
            yield signal.first


def _list(points: list[int]) -> str:
    return ", ".join(map(str, points)) or "none"
