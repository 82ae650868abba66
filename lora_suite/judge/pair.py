# SPDX-License-Identifier: Apache-2.0
"""One pair's verdict: may its arms be compared, were they measured, and what do its checks say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_suite.judge.block import environment_difference, lacking_runs, whole_blocks
from lora_suite.judge.fast_path import paths_note
from lora_suite.judge.matching import match_steps
from lora_suite.judge.pair_check import judge_pair_check
from lora_suite.judge.ratio import Method
from lora_suite.judge.statistics import CONFIDENCE, Prior
from lora_suite.judge.tail import tail_checks
from lora_suite.judge.verdict import PairVerdict, RunVerdict, State, worst
from lora_suite.plan.model import Difference, Pair


def judge_pair(
    pair: Pair,
    runs: Mapping[str, Sequence[RunVerdict]],
    priors: Mapping[str, Prior] | None = None,
    confidence: float = CONFIDENCE,
) -> PairVerdict:
    """Judge a pair on its arms' runs, each in the order of repeats: the k-th run of every arm are one block.

    Arms that differ in more than the pair allows, in their environment or in their batches are INCOMPARABLE.
    A run that is ERROR or MISSING makes the pair MISSING, which names it; the checks are then judged on the
    blocks that are whole, to show what was measured. A run that only failed a check was measured, and counts.

    priors: by the text of a check, what earlier repeats say of its spread. confidence: of the intervals; that
    of a look, where the pair is still running (`lora_suite.judge.looks`).
    """
    states: list[State] = []
    messages: list[str] = []
    lacking = list(lacking_runs(pair, runs))
    if lacking:
        states.append("MISSING")
        messages += lacking
    blocks = whole_blocks(pair, runs)
    matching = match_steps(blocks, different=pair.different_batches)
    differing = "; ".join(difference_text(each) for each in pair.not_comparable)
    incomparable = (
        f"arms differ in {differing}"
        if differing
        else environment_difference(blocks, pair.allow) or matching.difference
    )
    if incomparable:
        states.append("INCOMPARABLE")
        messages.insert(0, incomparable)
    comparable = blocks if not incomparable else []
    method = Method(pair.warmup, matching.steps, priors or {}, confidence)
    # A canary's answer is known for its own checks alone.
    asked = [*pair.checks, *(tail_checks(pair.checks) if pair.canary is None else ())]
    checks = [judge_pair_check(text, comparable, method) for text in asked if comparable]
    if not pair.checks:
        states.append("MISSING")
        messages.append("the pair has no check")
    notes = [f"planted fault: {difference_text(fault)}" for fault in pair.faults]
    if pair.not_compared:
        notes.append(f"not compared, as an arm does not say it: {', '.join(pair.not_compared)}")
    if checks:
        notes += filter(None, (matching.note, paths_note(blocks)))
    if checks and lacking:
        notes.append(f"judged on {len(blocks)} of {pair.repeats} repeats")
    return PairVerdict(
        name=pair.name,
        arms=dict(pair.arms),
        state=worst([*states, *(check.state for check in checks)]),
        own_state=worst(states),
        message="; ".join(messages),
        checks=checks,
        notes=notes,
    )


def difference_text(difference: Difference) -> str:
    """A key with the value of both arms."""
    return f"{difference.key} ({difference.left!r} and {difference.right!r})"
