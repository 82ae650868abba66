# SPDX-License-Identifier: Apache-2.0
"""The rows of the nightly monitor: they can fail, and they are met."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lora_suite.campaign.selftest import nights
from lora_suite.history.monitor import watch

DATA = Path(os.environ.get("LORA_SUITE_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


def test_noise_has_the_spread_and_the_correlation_that_it_claims():
    values = nights.scatter(1, 100_000, noise=0.005, correlation=0.3)
    assert np.std(values) == pytest.approx(0.005, rel=0.02)
    assert np.corrcoef(values[1:], values[:-1])[0, 1] == pytest.approx(0.3, abs=0.01)


def test_an_alert_before_the_change_is_no_finding():
    quiet = nights.scatter(3, 60)
    early = quiet.copy()
    early[20] += 0.2
    late = quiet.copy()
    late[40:] += 0.03
    assert nights.found_after(quiet, 40) is None
    assert nights.found_after(early, 40) is None
    found = nights.found_after(late, 40)
    assert found is not None
    assert (found.delay <= 2, found.error) == (True, 0)
    better = quiet.copy()
    better[40:] -= 0.03
    assert nights.found_after(better, 40) is None


def test_a_blind_monitor_meets_no_row_that_looks_for_a_change(monkeypatch):
    monkeypatch.setattr(nights, "watch", lambda values, policy: watch([0.1] * len(values), policy))
    rows = [nights._creep_row(20), nights._null_row(20), nights._step_row(0.02, 20)]
    assert [row.ok for row in rows] == [False, True, False]


def test_a_nervous_monitor_does_not_meet_the_row_without_a_change(monkeypatch):
    monkeypatch.setattr(nights, "signals", lambda logs: ["alert"])
    assert nights._null_row(20).ok is False


@pytest.mark.slow
def test_every_row_is_met():
    rows = nights.night_rows(full=False, data=DATA)
    assert len(rows) == 6
    assert [row.what for row in rows if row.ok is False] == []
    if (DATA / "tigerbeetle_throughput.json").is_file():
        assert rows[-1].measured == "2 of 2"


def test_without_recorded_series_that_row_says_so(tmp_path):
    (row,) = nights._known_rows(tmp_path)
    assert row.ok is None
    assert "LORA_SUITE_DATA" in row.notes


def test_a_recorded_series_whose_points_are_not_found_fails_its_row(tmp_path):
    document = {"values": [100.0] * 60, "known_change_points_default_settings": [30]}
    (tmp_path / "tigerbeetle_throughput.json").write_text(json.dumps(document))
    (row,) = nights._known_rows(tmp_path)
    assert (row.ok, row.measured) == (False, "0 of 1")
