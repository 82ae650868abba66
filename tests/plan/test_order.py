# SPDX-License-Identifier: Apache-2.0
"""The order of a pair's runs."""

from __future__ import annotations

import pytest

from lora_suite.plan.order import interleave


@pytest.mark.parametrize(
    ("repeats", "order"),
    [(1, "AB"), (2, "ABBA"), (3, "ABBABA"), (4, "ABBABAAB"), (8, "ABBABAABBAABABBA")],
)
def test_two_arms_alternate_as_abba_baab(repeats: int, order: str) -> None:
    assert "".join(arm for _, arm in interleave("AB", repeats)) == order


def test_every_repeat_runs_every_arm_once() -> None:
    runs = list(interleave("ABC", 5))
    for repeat in range(1, 6):
        assert sorted(arm for number, arm in runs if number == repeat) == ["A", "B", "C"]


def test_drifts_cancel_over_four_repeats() -> None:
    """With times that grow linearly or quadratically both arms have the same mean."""
    runs = list(interleave("AB", 4))
    for power in (1, 2):
        total = {
            arm: sum(position**power for position, (_, name) in enumerate(runs) if name == arm)
            for arm in "AB"
        }
        assert total["A"] == total["B"]


def test_sequence_can_be_continued() -> None:
    whole = list(interleave("AB", 8))
    assert list(interleave("AB", 3)) + list(interleave("AB", 5, first=4)) == whole
