# SPDX-License-Identifier: Apache-2.0
"""Which run is next, and when a pair has had enough of them.

Runs follow one another in the plan's order; the next is asked for when the one before has ended, so no two
are ever at once. A pair with looks is judged after each of them and ends as soon as more runs could not
change what is said of it, or where the time budget has none left for it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from lora_suite.judge.looks import judge_look
from lora_suite.judge.suite import DID_NOT_RUN, Execution, looks_made
from lora_suite.judge.verdict import PairVerdict
from lora_suite.plan.model import Pair, Plan, PlannedRun

_DECIDED = "decided"
_HOPELESS = "more repeats would not tell"


class Schedule:
    """The runs of a plan, one at a time. Iterate over it, and put what became of each into `executions`.

    executions: of the runs so far; read, never changed. judge: the verdict of the only pair of a plan, on the
    executions so far. clock: seconds, for the budget, which begins now.
    """

    def __init__(
        self,
        plan: Plan,
        executions: Mapping[PlannedRun, Execution],
        judge: Callable[[Plan], PairVerdict],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._executions = executions
        self._judge = judge
        self._clock = clock
        self._began = clock()
        self._pairs = {pair.name: pair for pair in plan.pairs}
        self._numbers = _numbers(plan)
        # Repeats that were asked for, and why no more of them are.
        self._asked = {pair.name: (pair.looks or (pair.repeats,))[0] for pair in plan.pairs}
        self._ended: dict[str, str] = {}
        self._over = False

    def __iter__(self) -> Iterator[PlannedRun]:
        """Yield the next run, until there is none that is needed and that the budget has time for."""
        for planned in self._plan.runs:
            if self._is_asked(planned):
                # What was begun within the budget is ended: half a look says nothing.
                if not self._is_first(planned) or not self._budget_is_over():
                    yield planned
            elif self._go_on(self._pairs[str(planned.pair)]):
                yield planned

    @property
    def absent(self) -> str:
        """Why a run that was asked for did not run."""
        return f"{DID_NOT_RUN}: {self._budget_text()}" if self._over else DID_NOT_RUN

    def rest(self) -> list[PlannedRun]:
        """The runs that are still to come, as far as they are asked for yet."""
        return [run for run in self._plan.runs if self._is_asked(run) and run not in self._executions]

    def carried_out(self) -> Plan:
        """The plan without the repeats that were not asked for: what there must be a verdict of."""
        runs = tuple(run for run in self._plan.runs if self._is_asked(run))
        made = Counter(run.case for run in runs if not run.discarded)
        return replace(
            self._plan,
            runs=runs,
            pairs=tuple(
                replace(pair, repeats=self._repeats(pair, made), ended=self._ended.get(pair.name, ""))
                for pair in self._plan.pairs
            ),
        )

    def _repeats(self, pair: Pair, made: Mapping[str, int]) -> int:
        """Repeats of a pair as it was carried out; where it reuses runs, those that all its arms have."""
        if not pair.looks:
            return pair.repeats
        if pair.reuse:
            return min(pair.repeats, *(made[case] for case in pair.arms.values()))
        return self._asked[pair.name]

    def _is_asked(self, planned: PlannedRun) -> bool:
        pair = self._pairs.get(planned.pair or "")
        return pair is None or self._numbers[planned] <= self._asked[pair.name]

    def _is_first(self, planned: PlannedRun) -> bool:
        """Whether a run belongs to no look but the first."""
        pair = self._pairs.get(planned.pair or "")
        return pair is None or not pair.looks or self._numbers[planned] <= pair.looks[0]

    def _go_on(self, pair: Pair) -> bool:
        """Look at a pair whose asked-for repeats are made; whether it gets those up to the next look."""
        if pair.name in self._ended:
            return False
        reason = self._end(pair)
        if reason is not None:
            self._ended[pair.name] = reason
            return False
        self._asked[pair.name] = self._next_look(pair)
        return True

    def _end(self, pair: Pair) -> str | None:
        """Why a pair gets no more runs, None where it needs and gets them."""
        made = replace(pair, repeats=self._asked[pair.name])
        own = [run for run in self._plan.runs if run.pair == pair.name and self._numbers[run] <= made.repeats]
        part = replace(self._plan, pairs=(made,), runs=tuple(own))
        verdict = self._judge(part)
        cut = self._over and verdict.own_state == "MISSING"
        look = judge_look(verdict, len(looks_made(made)), len(pair.looks))
        if look.state != "go on" and not cut:
            return _HOPELESS if verdict.state == "INCONCLUSIVE" else _DECIDED
        return None if self._has_time(pair) else self._budget_text()

    def _next_look(self, pair: Pair) -> int:
        return next(look for look in pair.looks if look > self._asked[pair.name])

    def _has_time(self, pair: Pair) -> bool:
        """Whether the runs up to the next look will fit, if they take as long as those before."""
        if self._plan.budget_minutes is None:
            return True
        more = self._next_look(pair) - self._asked[pair.name]
        seconds = mean_seconds(self._executions)
        needed = more * sum(seconds.get(case, 0.0) for case in pair.arms.values())
        return self._clock() - self._began + needed <= 60.0 * self._plan.budget_minutes

    def _budget_is_over(self) -> bool:
        budget = self._plan.budget_minutes
        self._over = budget is not None and self._clock() - self._began >= 60.0 * budget
        return self._over

    def _budget_text(self) -> str:
        return f"the budget of {self._plan.budget_minutes:g} minutes was over"


def mean_seconds(executions: Mapping[PlannedRun, Execution]) -> dict[str, float]:
    """Mean wall-clock time of a run, by case."""
    seconds = defaultdict(list)
    for planned, execution in executions.items():
        seconds[planned.case].append(execution.seconds)
    return {case: statistics.fmean(values) for case, values in seconds.items()}


def _numbers(plan: Plan) -> dict[PlannedRun, int]:
    """The number of each run among those of its pair and arm, from 1; 0 for discarded runs."""
    counts: Counter[tuple[str | None, str | None]] = Counter()
    numbers = {}
    for run in plan.runs:
        counts[run.pair, run.arm] += not run.discarded
        numbers[run] = counts[run.pair, run.arm] if not run.discarded else 0
    return numbers
