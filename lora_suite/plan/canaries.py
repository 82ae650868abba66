# SPDX-License-Identifier: Apache-2.0
"""Canaries of a suite: pairs of a case with itself, whose answer is known before they run.

A detector that stays silent on a planted slowdown is blind, one that sees a difference between a case and
itself cries wolf. Either way, what it says of the other pairs tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lora_suite.config.naming import counts_cpu_processes
from lora_suite.plan.comparability import compare_cases, planted_faults, with_faults
from lora_suite.plan.metric_names import STEP_TIME
from lora_suite.plan.model import AnyCase, Canary, Case, Pair
from lora_suite.plan.suite_file import CanaryEntry, SuiteFile

FIRST = "normal"
SECOND = {"same": "again", "slower": "slowed", "injected": "slowed"}
"""The second arm's name, by what is done to it."""

_ON_GPUS, _ON_CPUS = 1.02, 3.0
_LARGEST_ON_CPUS = 1.5


def factor_of(entry: CanaryEntry) -> float:
    """The factor of a canary that does not say it.

    On GPUs 2 %, which a nightly gate is to see. On CPU processes, whose times scatter by several percent, a
    planted slowdown is threefold, and a false alarm is one of a half.
    """
    if entry.factor is not None:
        return entry.factor
    if not counts_cpu_processes(entry.case):
        return _ON_GPUS
    return _LARGEST_ON_CPUS if entry.kind == "same" else _ON_CPUS


def slowing(entry: CanaryEntry) -> str:
    """The override that slows the second arm of a canary of kind `slower` down."""
    return f"debug.faults.slow_step={factor_of(entry)!r}"


def slowed_name(entry: CanaryEntry) -> str:
    """The name of the slowed case, and so of its folder in the results."""
    return f"{entry.case}-slowed"


def slowed_case(case: Case, entry: CanaryEntry) -> Case:
    """A case that was resolved with `slowing`, under a name of its own.

    It may well miss its limits, which says nothing: so it has none.
    """
    return replace(case, stem=slowed_name(entry), checks=(), driver_judges=False)


def canary_pair(suite: SuiteFile, entry: CanaryEntry, cases: Mapping[str, AnyCase]) -> Pair:
    """The pair of a canary; of kind `injected` it has no runs of its own."""
    second = slowed_name(entry) if entry.kind == "slower" else entry.case
    name = SECOND[entry.kind]
    left, right = cases[entry.case], cases[second]
    canary = Canary(entry.kind, factor_of(entry))
    return Pair(
        name=entry.title,
        arms={FIRST: entry.case, name: second},
        checks=_checks(canary, name),
        repeats=entry.repeats,
        reuse=entry.kind == "injected",
        warmup=suite.warmup,
        not_comparable=compare_cases(left, right).refused,
        faults=planted_faults(with_faults(left), with_faults(right)),
        canary=canary,
    )


def _checks(canary: Canary, second: str) -> tuple[str, ...]:
    """What the detector is asked: whether the second arm is slower; of equal arms, in both directions."""
    ratio = f'ratio({second}["{STEP_TIME}"], {FIRST}["{STEP_TIME}"])'
    if canary.kind == "same":
        return (f"{ratio} < {canary.factor:.6g}", f"{ratio} > {1 / canary.factor:.6g}")
    return (f"{ratio} < 1.00",)
