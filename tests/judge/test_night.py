# SPDX-License-Identifier: Apache-2.0
"""A night is as bad as the worst of its suites, in the order that a single suite's exit code has."""

from __future__ import annotations

import pytest

from lora_suite.judge.night import NightVerdict, SuiteOutcome


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([0, 0], 0),
        ([0, 5, 0], 5),
        ([5, 1], 1),
        ([1, 4, 5], 4),
        ([4, 3], 3),
        ([3, 2, 1], 2),
        ([2, 130, 3], 130),
    ],
)
def test_the_worst_suite_decides(codes: list[int], worst: int) -> None:
    suites = [
        SuiteOutcome(name=str(code), suite=f"suites/{code}.yaml", exit_code=code, outcome="")
        for code in codes
    ]
    started = "2026-03-01T02:00:00+00:00"
    night = NightVerdict(started=started, seconds=1.0, host="h", directory="d", gpu_hours=0.0, suites=suites)
    assert night.exit_code == worst
