# SPDX-License-Identifier: Apache-2.0
"""LoRA invariants: what must hold in every LoRA training of ours, whatever its loss looks like."""

from __future__ import annotations

from collections.abc import Iterator

from lora_suite.judge.verdict import CheckVerdict, State
from lora_suite.launch.record import RunRecord
from lora_suite.plan.model import Case

# Names as the training writes them into run.json. A LoRA run whose record lacks one is incomplete.
TRAINABLE_PARAMS = "trainable_params"
STEP1_LOSS_EQUALS_BASE = "step1_loss_equals_base"
B_GRADIENTS_STEP1 = "b_gradients_step1"
A_GRADIENTS_STEP2 = "a_gradients_step2"
FROZEN_UNCHANGED = "frozen_unchanged"
REPLICAS_EQUAL = "replicas_equal"
ADAPTERS_MOVED = "adapters_moved"
LAYER_COVERAGE = "layer_coverage"
ADAPTERS_RESUMED = "adapters_resumed"
ADAPTERS_FINITE = "adapters_finite"
ADAPTER_GROWTH = "adapter_growth"
ONLY_ADAPTERS_TRAIN = "only_adapters_train"
ADAPTER_FORMULA = "adapter_formula"
DROPOUT_APPLIED = "dropout_applied"
INVARIANTS_COST = "invariants_cost"

REQUIRED_INVARIANTS = (
    TRAINABLE_PARAMS,
    STEP1_LOSS_EQUALS_BASE,
    B_GRADIENTS_STEP1,
    A_GRADIENTS_STEP2,
    FROZEN_UNCHANGED,
    REPLICAS_EQUAL,
    ADAPTERS_MOVED,
    LAYER_COVERAGE,
    ADAPTERS_RESUMED,
    ADAPTERS_FINITE,
    ADAPTER_GROWTH,
    ONLY_ADAPTERS_TRAIN,
    ADAPTER_FORMULA,
    DROPOUT_APPLIED,
    INVARIANTS_COST,
)

_ELSEWHERE = "not measured in an external run"
_AT_THE_START = (STEP1_LOSS_EQUALS_BASE, B_GRADIENTS_STEP1, A_GRADIENTS_STEP2)


def not_applicable(case: Case, first_step: int) -> dict[str, str]:
    """Required invariants that have no meaning in this run, with the reason, printed and not judged."""
    reasons: dict[str, str] = {}
    if getattr(case.recipe.policy.lora, "lora_B_init_method", "zero") != "zero":
        reasons[STEP1_LOSS_EQUALS_BASE] = "B does not start at zero"
    if case.steps < 2:
        reasons[A_GRADIENTS_STEP2] = "the run has one step"
    if first_step > 1:
        reasons |= dict.fromkeys(_AT_THE_START, f"the run continues at step {first_step}")
    return reasons


def not_measured(record: RunRecord) -> dict[str, str]:
    """What an external run did not measure, with the reason, printed and not judged: often all of it."""
    if not record.invariants:
        return {"LoRA invariants": _ELSEWHERE}
    found = dict.fromkeys(REQUIRED_INVARIANTS, _ELSEWHERE)
    for invariant in record.invariants:
        found.pop(invariant.name, None)
        if invariant.ok is None:
            found[invariant.name] = f"not measured: {invariant.message}"
    return found


def judge_invariants(record: RunRecord, skipped: dict[str, str]) -> Iterator[CheckVerdict]:
    """One verdict for every required invariant that applies, and for every further one that was recorded.

    skipped: what `not_applicable` named. An invariant that is absent or was not measured is MISSING.
    """
    yield from judge_recorded(record, skipped)
    recorded = {invariant.name for invariant in record.invariants}
    for name in REQUIRED_INVARIANTS:
        if name not in recorded and name not in skipped:
            yield CheckVerdict(kind="invariant", name=name, state="MISSING", message="not in run.json")


def judge_recorded(record: RunRecord, skipped: dict[str, str]) -> Iterator[CheckVerdict]:
    """One verdict for every invariant that was recorded and is not skipped."""
    for invariant in record.invariants:
        if invariant.name in skipped:
            continue
        state: State
        if invariant.ok is None:
            state, message = "MISSING", f"not measured: {invariant.message}"
        else:
            state, message = ("PASS" if invariant.ok else "FAIL"), invariant.message
        yield CheckVerdict(kind="invariant", name=invariant.name, state=state, message=message)
