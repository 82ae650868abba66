# SPDX-License-Identifier: Apache-2.0
"""Damaged input: none passes, and one that did would be counted."""

from __future__ import annotations

from collections import Counter

import pytest

from lora_suite.campaign.selftest import damaged
from lora_suite.campaign.selftest.damaged import Fault, faults, silent_pass_row


@pytest.mark.slow
def test_nothing_passes_in_silence():
    row = silent_pass_row()
    assert row.ok is True, row.notes
    assert row.measured.startswith("0 of ")


def test_every_kind_is_tried():
    kinds = Counter(fault.kind for fault in faults())
    assert kinds.keys() == {"corrupt", "short", "empty", "NaN", "stale", "swapped", "broken"}
    assert min(kinds.values()) >= 5
    assert len({fault.name for fault in faults()}) == kinds.total()


def test_what_does_no_harm_is_counted_as_a_silent_pass(monkeypatch):
    harmless = Fault("corrupt", "nothing at all", contents=lambda metrics, record: None)
    real = Fault("short", "half", steps=5)
    monkeypatch.setattr(damaged, "faults", lambda: iter((harmless, real)))
    row = silent_pass_row()
    assert row.ok is False
    assert row.measured == "2 of 4"
    assert "nothing at all (lora)" in row.notes
    assert "half" not in row.notes


def test_a_suite_that_never_passes_proves_nothing(monkeypatch):
    monkeypatch.setattr(damaged, "faults", lambda: iter(()))
    monkeypatch.setitem(damaged._STEP_TIMES, "lora", 0.2)
    row = silent_pass_row()
    assert row.ok is False
    assert "the undamaged suite does not pass" in row.notes


def test_metrics_swapped_between_runs_are_known_by_their_hash_alone(monkeypatch):
    """Without the hash in run.json nobody could tell."""
    (swap,) = (fault for fault in faults() if fault.name == "metrics with an earlier repeat")
    monkeypatch.setattr(damaged, "faults", lambda: iter((swap,)))
    assert silent_pass_row().ok is True
    monkeypatch.setattr(damaged, "_inputs", lambda: iter([(swap, "lora", False)]))
    assert silent_pass_row().measured == "1 of 1"
