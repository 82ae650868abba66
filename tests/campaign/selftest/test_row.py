# SPDX-License-Identifier: Apache-2.0
"""Rows: the exact interval against scipy's, and shares."""

from __future__ import annotations

import pytest
from scipy import stats

from lora_suite.campaign.selftest.row import binomial_interval, share_row


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (10, 10), (1, 42), (41, 42), (101, 2000), (7, 9)])
@pytest.mark.parametrize("confidence", [0.95, 0.9])
def test_interval(hits, trials, confidence):
    theirs = stats.binomtest(hits, trials).proportion_ci(confidence, method="exact")
    assert binomial_interval(hits, trials, confidence) == pytest.approx((theirs.low, theirs.high))


def test_share():
    row = share_row("noise", "≤ 6 %", 3, 100, lambda share: share <= 0.06)
    assert (row.measured, row.ok) == ("3.00 %", True)
    assert row.notes == "3 of 100, 95 % interval 0.62 to 8.52 %"
    assert share_row("noise", "≤ 6 %", 7, 100, lambda share: share <= 0.06).ok is False
