# SPDX-License-Identifier: Apache-2.0
"""Whether the arms of a pair saw the same batches, so that their steps may be compared one by one.

Our trainer records a fingerprint of every global batch. Another trainer at best says how many supervised
tokens a batch had: equal counts at every step are weak evidence of equal batches, and are called so. Without
either, and where a pair's arms are meant to see different rows, steps are not matched, and only medians of
whole runs are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lora_suite.judge.block import Block, batch_difference, first_unequal_step
from lora_suite.judge.evidence import Evidence
from lora_suite.plan.metric_names import VALID_TOKENS

_DIFFERENT = "steps are not matched: the arms are meant to see different batches; medians are compared"
_WEAK = "batches are matched by their number of supervised tokens alone, which is weak evidence"


@dataclass(frozen=True)
class Matching:
    """steps: whether they may be matched. difference: why arms cannot be compared. note: what to know."""

    steps: bool
    difference: str | None = None
    note: str | None = None


def match_steps(blocks: Sequence[Block], *, different: bool = False) -> Matching:
    """Ask the runs of a pair; without an external arm the batches' own fingerprints decide.

    different: whether the arms are meant to see different batches.
    """
    if different:
        return Matching(False, note=_DIFFERENT)
    runs = [(arm, run) for block in blocks for arm, run in block.arms.items()]
    if not any(run.record.dialect is not None for _, run in runs):
        return Matching(True, batch_difference(blocks))
    silent = dict.fromkeys(arm for arm, run in runs if not _tokens(run))
    if silent:
        who = " and ".join(silent)
        return Matching(
            False, note=f"steps are not matched: {who} says nothing of its batches; medians are compared"
        )
    return Matching(True, _token_difference(blocks), _WEAK)


def _token_difference(blocks: Sequence[Block]) -> str | None:
    """The first step at which arms of a block had different numbers of supervised tokens."""
    for block in blocks:
        for (left, ours), (right, theirs) in combinations(block.arms.items(), 2):
            steps = range(min(ours.first_step, theirs.first_step), max(ours.last_step, theirs.last_step) + 1)
            step = first_unequal_step(_tokens(ours), _tokens(theirs), steps)
            if step is not None:
                return (
                    f"{left} and {right} had different numbers of supervised tokens at step {step} of run "
                    f"{block.repeat} ({_tokens(ours).get(str(step))} and {_tokens(theirs).get(str(step))})"
                )
    return None


def _tokens(run: Evidence) -> Mapping[str, str]:
    """Supervised tokens of each step as texts, empty where the run does not say them."""
    series = run.metrics.get(VALID_TOKENS)
    if series is None:
        return {}
    return {str(step): f"{value:.15g}" for step, value in zip(series.steps, series.values, strict=True)}
