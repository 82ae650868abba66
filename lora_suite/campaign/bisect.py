# SPDX-License-Identifier: Apache-2.0
"""`lora-suite bisect`: the commit from which on a pair's arm is slower, where times are noisy.

A commit is probed by a pair of its own: that commit's arm against the good commit's, interleaved on this
machine, looked at until it is decided. So an answer has three states. `good` and `bad` halve the range; an
`unclear` commit, or one that does not run, is left aside, and where such commits are all that is left, the
range that remains is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lora_suite.campaign.repository import Commit

State = Literal["good", "bad", "unclear", "skipped", "no time"]


@dataclass(frozen=True)
class Answer:
    """What a probe of one commit says.

    `skipped`: it does not run, or cannot be compared. `no time`: the budget is over, and nothing was run.
    ratio: of its arm to the good commit's, where it was measured.
    """

    state: State
    message: str
    ratio: float | None = None


Probe = Callable[[Commit, float], Answer]
"""Probes a commit against the good one: whether its arm's ratio is beyond a limit, given second."""


@dataclass
class Search:
    """Where a slowdown came in.

    range: commits that may be the first bad one, oldest first; one of them if it was found, none where the
    end points are not what they were said to be (`problem`). answers: of every commit that was probed.
    """

    range: list[Commit] = field(default_factory=list)
    answers: dict[Commit, Answer] = field(default_factory=dict)
    problem: str = ""

    @property
    def found(self) -> Commit | None:
        """The first bad commit, if it can be told."""
        return self.range[0] if len(self.range) == 1 else None


def bisect(good: Commit, commits: Sequence[Commit], probe: Probe, tell: Callable[[str], None]) -> Search:
    """Search the first bad commit.

    commits: those after `good`, oldest first; the last is the bad one. tell: gets a line for each probe.
    The end points come first: the bad commit's arm must differ from the good one's at all, and half of that
    difference (on the log scale) is then the limit by which the others are told apart, the good commit among
    them: against itself it must come out as good.
    """
    search = Search()
    bad = commits[-1]

    def ask(commit: Commit, limit: float) -> Answer:
        answer = search.answers[commit] = probe(commit, limit)
        tell(f"{answer.state}: {commit}{': ' if answer.message else ''}{answer.message}")
        return answer

    first = ask(bad, 1.0)
    if first.state != "bad" or first.ratio is None:
        search.problem = f"the bad commit does not differ from the good one: {first.state}, {first.message}"
        return search
    limit = first.ratio**0.5
    if (itself := ask(good, limit)).state != "good":
        search.problem = f"the good commit cannot be told from the bad one: {itself.state}, {itself.message}"
        return search
    low, high = -1, len(commits) - 1
    while True:
        untold = [n for n in range(low + 1, high) if commits[n] not in search.answers]
        if not untold:
            break
        middle = min(untold, key=lambda n: abs(2 * n - low - high))
        state = ask(commits[middle], limit).state
        if state == "no time":
            break
        if state == "good":
            low = middle
        elif state == "bad":
            high = middle
    search.range = list(commits[low + 1 : high + 1])
    return search
