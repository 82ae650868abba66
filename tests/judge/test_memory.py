# SPDX-License-Identifier: Apache-2.0
"""Peak memory against a reference, in whole blocks of 2 MiB."""

from __future__ import annotations

import math

import pytest

from lora_suite.judge.memory import compare_peaks

BLOCK = 1 / 512


@pytest.mark.parametrize(
    ("blocks", "reference", "kind", "state"),
    [
        (1000, 1000, "equal", "PASS"),
        (1000.4, 999.6, "equal", "PASS"),
        (1001, 1000, "slight", "PASS"),
        (1005, 1000, "slight", "PASS"),
        (1006, 1000, "more", "FAIL"),
        (995, 1000, "slight", "PASS"),
        (994, 1000, "less", "PASS"),
        (100, 99, "more", "FAIL"),
    ],
)
def test_kind(blocks, reference, kind, state):
    change = compare_peaks(blocks * BLOCK, reference * BLOCK)
    assert (change.kind, change.state) == (kind, state)


def test_words():
    assert str(compare_peaks(12.5, 12.0)) == "12.50 GiB, 4.17 % more than 12.00 GiB (+256 blocks of 2 MiB)"
    assert str(compare_peaks(6.0, 12.0)) == "6.00 GiB, 50.00 % less than 12.00 GiB (-3072 blocks of 2 MiB)"
    assert str(compare_peaks(6.0, 6.0)) == "6.00 GiB, equal to the block of 2 MiB"


def test_another_growth():
    assert compare_peaks(1.03, 1.0, growth=0.05).state == "PASS"
    assert compare_peaks(1.06, 1.0, growth=0.05).share == pytest.approx(0.06, abs=BLOCK)


@pytest.mark.parametrize("value", [0.0, -1.0, BLOCK / 3, math.nan, math.inf])
def test_what_is_no_peak_is_refused(value):
    for pair in ((value, 1.0), (1.0, value)):
        with pytest.raises(ValueError, match="is no peak of memory"):
            compare_peaks(*pair)
