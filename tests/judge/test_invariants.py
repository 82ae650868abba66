# SPDX-License-Identifier: Apache-2.0
"""Invariants of a run that is not ours: what was measured is judged, what was not is named with why."""

from __future__ import annotations

from lora_suite.judge.invariants import REQUIRED_INVARIANTS, judge_recorded, not_measured
from lora_suite.launch.record import Invariant, RunRecord


def record(*invariants: Invariant) -> RunRecord:
    """A record of these invariants."""
    started = "2026-03-01T00:00:00+00:00"
    return RunRecord(
        run_id="r", case="theirs", started=started, recipe={}, recipe_hash="", invariants=list(invariants)
    )


def test_a_run_that_measured_nothing_says_so_once() -> None:
    nothing = record()
    assert not_measured(nothing) == {"LoRA invariants": "not measured in an external run"}
    assert list(judge_recorded(nothing, not_measured(nothing))) == []


def test_what_was_measured_is_judged_and_every_other_is_named() -> None:
    some = record(
        Invariant(name="frozen_unchanged", ok=False, message="1 of 3 tensors changed"),
        Invariant(name="adapters_moved", ok=True, message="all"),
        Invariant(name="replicas_equal", ok=None, message="one rank"),
        Invariant(name="of_their_own", ok=True, message="fine"),
    )
    skipped = not_measured(some)
    assert set(skipped) == set(REQUIRED_INVARIANTS) - {"frozen_unchanged", "adapters_moved"}
    assert skipped.pop("replicas_equal") == "not measured: one rank"
    assert set(skipped.values()) == {"not measured in an external run"}
    judged = {each.name: (each.state, each.message) for each in judge_recorded(some, not_measured(some))}
    assert judged == {
        "frozen_unchanged": ("FAIL", "1 of 3 tensors changed"),
        "adapters_moved": ("PASS", "all"),
        "of_their_own": ("PASS", "fine"),
    }
