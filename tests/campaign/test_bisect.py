# SPDX-License-Identifier: Apache-2.0
"""The search itself, on commits that are only names and probes that are only numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from lora_suite.campaign.bisect import Answer, Probe, Search, bisect
from lora_suite.campaign.repository import Commit

GOOD = Commit("g", "good")
COMMITS = [Commit(f"{number:02}", f"change {number}") for number in range(20)]


def search(probe: Probe, commits: list[Commit] = COMMITS) -> tuple[Search, list[str]]:
    """Search, and what was told meanwhile."""
    told: list[str] = []
    return bisect(GOOD, commits, probe, told.append), told


def exact(first_bad: int, ratio: float = 1.2, special: dict[int, Answer] | None = None) -> Probe:
    """A probe without noise: the arm takes `ratio` times as long from a commit on."""

    def probe(commit: Commit, limit: float) -> Answer:
        number = -1 if commit == GOOD else int(commit.sha)
        if special and number in special:
            return special[number]
        value = ratio if number >= first_bad else 1.0
        return Answer("bad" if value > limit else "good", f"{value:g}", value)

    return probe


@pytest.mark.parametrize("first_bad", range(20))
def test_the_first_bad_commit_is_found_in_few_probes(first_bad: int) -> None:
    found, _ = search(exact(first_bad))
    assert found.found == COMMITS[first_bad]
    # The two end points, and a binary search of 19 commits.
    assert len(found.answers) <= 2 + math.ceil(math.log2(20))


def test_the_end_points_come_first_and_set_the_limit() -> None:
    limits: list[tuple[str, float]] = []

    def probe(commit: Commit, limit: float) -> Answer:
        limits.append((commit.sha, limit))
        return exact(7, ratio=1.44)(commit, limit)

    search(probe)
    assert limits[:2] == [("19", 1.0), ("g", pytest.approx(1.2))]
    # Halfway between equal and 1.44, as a ratio.
    assert all(limit == pytest.approx(1.2) for _, limit in limits[1:])


@pytest.mark.parametrize("state", ["good", "unclear", "skipped", "no time"])
def test_a_bad_commit_that_is_not_slower_ends_the_search(state: str) -> None:
    answer = Answer(state, "1.001 [0.99, 1.01]", 1.001)  # type: ignore[arg-type]
    found, _ = search(exact(7, special={19: answer}))
    assert (found.found, found.range) == (None, [])
    assert found.problem == f"the bad commit does not differ from the good one: {state}, 1.001 [0.99, 1.01]"
    assert len(found.answers) == 1


@pytest.mark.parametrize("state", ["bad", "unclear", "skipped"])
def test_a_good_commit_that_differs_from_itself_ends_the_search(state: str) -> None:
    found, _ = search(exact(7, special={-1: Answer(state, "noise")}))  # type: ignore[arg-type]
    assert found.problem == f"the good commit cannot be told from the bad one: {state}, noise"
    assert len(found.answers) == 2


@pytest.mark.parametrize("state", ["skipped", "unclear"])
def test_commits_that_do_not_tell_are_left_aside(state: str) -> None:
    away = Answer(state, "does not run")  # type: ignore[arg-type]
    found, told = search(exact(7, special={9: away, 3: away, 10: away}))
    assert found.found == COMMITS[7]
    assert f"{state}: 09 change 9: does not run" in told


def test_where_they_hide_the_first_bad_one_the_range_remains() -> None:
    away = Answer("skipped", "does not run")
    found, _ = search(exact(7, special={6: away, 7: away, 8: away}))
    assert found.found is None
    # The last good one is 5, the first that is surely bad is 9.
    assert found.range == COMMITS[6:10]
    assert not found.problem


def test_a_budget_that_ends_leaves_the_range() -> None:
    probes = 0

    def probe(commit: Commit, limit: float) -> Answer:
        nonlocal probes
        probes += 1
        return exact(7)(commit, limit) if probes <= 3 else Answer("no time", "the budget is over")

    found, _ = search(probe)
    assert probes == 4
    assert COMMITS[7] in found.range
    assert 1 < len(found.range) < 20


def noisy(first_bad: int, ratio: float, spread: float, seed: int) -> Callable[[Commit, float], Answer]:
    """Probes of 8 repeats that scatter by `spread`, decided on their 99.8 % normal interval."""
    source = random.Random(seed)

    def probe(commit: Commit, limit: float) -> Answer:
        truth = math.log(ratio) if commit != GOOD and int(commit.sha) >= first_bad else 0.0
        measured = source.gauss(truth, spread / math.sqrt(8))
        half = 3.09 * spread / math.sqrt(8)
        value = math.exp(measured)
        if measured - half > math.log(limit):
            return Answer("bad", "", value)
        return Answer("good" if measured + half < math.log(limit) else "unclear", "", value)

    return probe


def test_noise_leaves_a_range_and_names_no_wrong_commit() -> None:
    """5 % slower, repeats scatter by 1 %: the answer is right, or a range that holds it."""
    found = [search(noisy(seed % 20, 1.05, 0.01, seed))[0] for seed in range(200)]
    assert all(each.problem or COMMITS[seed % 20] in each.range for seed, each in enumerate(found))
    assert sum(each.found is not None for each in found) >= 190


def test_noise_that_drowns_the_slowdown_is_said() -> None:
    found = [search(noisy(7, 1.005, 0.03, seed))[0] for seed in range(100)]
    assert sum(bool(each.problem) for each in found) >= 95
