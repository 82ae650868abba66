# SPDX-License-Identifier: Apache-2.0
"""Blocks: the runs of a pair's arms that belong together, and whether they may be compared step by step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from check_metrics import Series
from lora_suite.config import flatten
from lora_suite.judge.evidence import Evidence, read_evidence
from lora_suite.judge.verdict import RunVerdict
from lora_suite.plan.model import Pair

# Facts of the environment that keys of the recipe decide.
_DECIDED_BY = {"world_size": frozenset({"cluster", "cluster.num_nodes", "cluster.gpus_per_node"})}
_UNUSABLE = frozenset({"ERROR", "MISSING"})


@dataclass(frozen=True)
class Block:
    """One run of every arm, by arm: the `repeat`-th (from 1) of a pair."""

    repeat: int
    arms: Mapping[str, Evidence]

    @property
    def metrics(self) -> dict[str, Mapping[str, Series]]:
        """The series of every arm, as checks read them."""
        return {arm: run.metrics for arm, run in self.arms.items()}


def whole_blocks(pair: Pair, runs: Mapping[str, Sequence[RunVerdict]]) -> list[Block]:
    """The repeats of which every arm was measured. A run that only failed a check was measured."""
    return [
        Block(repeat, {arm: read_evidence(Path(runs[arm][repeat - 1].directory)) for arm in pair.arms})
        for repeat in range(1, pair.repeats + 1)
        if not any(_problem(runs.get(arm, ()), repeat) for arm in pair.arms)
    ]


def lacking_runs(pair: Pair, runs: Mapping[str, Sequence[RunVerdict]]) -> Iterator[str]:
    """Name, per repeat and arm, each run that was not measured, with what became of it."""
    for repeat in range(1, pair.repeats + 1):
        for arm in pair.arms:
            problem = _problem(runs.get(arm, ()), repeat)
            if problem is not None:
                yield f"{arm} run {repeat}: {problem}"


def environment_difference(blocks: Sequence[Block], allow: Collection[str] = ()) -> str | None:
    """The strict environment facts in which two runs of the pair differ; None where all agree.

    Facts that only one of them recorded (a package that one backend uses) are no difference. allow: key
    prefixes in which the pair's arms may differ; a fact that such a key decides may differ, too.
    """
    settled = {fact for fact, keys in _DECIDED_BY.items() if not keys.isdisjoint(allow)}
    named = {f"{arm} run {block.repeat}": run for block in blocks for arm, run in block.arms.items()}
    facts = {
        name: flatten(run.record.environment.strict) if run.record.environment else {}
        for name, run in named.items()
    }
    for (left, ours), (right, theirs) in combinations(facts.items(), 2):
        found = [key for key in ours if key in theirs and key not in settled and ours[key] != theirs[key]]
        if found:
            values = ", ".join(f"{key}: {ours[key]} and {theirs[key]}" for key in found)
            return f"{left} and {right} ran in different environments ({values})"
    return None


def batch_difference(blocks: Iterable[Block]) -> str | None:
    """The first step whose global batch differs between arms of a block; None where the arms saw the same.

    Only then may steps be matched by index. A step without a fingerprint is a difference.
    """
    for block in blocks:
        for (left, ours), (right, theirs) in combinations(block.arms.items(), 2):
            step = first_unequal_step(ours.record.batches, theirs.record.batches, _steps(ours, theirs))
            if step is not None:
                return f"{left} and {right} saw different batches at step {step} of run {block.repeat}"
    return None


def first_unequal_step(left: Mapping[str, str], right: Mapping[str, str], steps: Iterable[int]) -> int | None:
    """The first of `steps` whose batch fingerprints differ or are absent, None where all agree."""
    for step in steps:
        ours = left.get(str(step))
        if ours is None or ours != right.get(str(step)):
            return step
    return None


def _problem(runs: Sequence[RunVerdict], repeat: int) -> str | None:
    if len(runs) < repeat:
        return "not planned"
    run = runs[repeat - 1]
    if run.state not in _UNUSABLE:
        return None
    broken = run.message or next(check.message for check in run.checks if check.state == run.state)
    return f"{run.state} {broken.splitlines()[0]}"


def _steps(left: Evidence, right: Evidence) -> range:
    first = min(left.first_step, right.first_step)
    return range(first, max(left.last_step, right.last_step) + 1)
