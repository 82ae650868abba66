# SPDX-License-Identifier: Apache-2.0
"""Baselines: a suite run under a name, and what became of its figures since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_suite.history.artefacts import read_session
from lora_suite.history.facts import BaselineFact, RunFact, SessionFact, now
from lora_suite.history.figures import Figure, compare_figure
from lora_suite.history.metrics import PEAK_MEMORY
from lora_suite.history.store import Store
from lora_suite.judge.verdict import State, worst
from lora_suite.plan.metric_names import STEP_TIME

_METRICS = (STEP_TIME, PEAK_MEMORY)
_UNUSABLE = frozenset({"ERROR", "MISSING"})


@dataclass(frozen=True)
class CaseDifference:
    """What became of one case since the baseline. own_state: whether it could be compared at all."""

    case: str
    own_state: State
    message: str
    figures: tuple[Figure, ...] = ()

    @property
    def state(self) -> State:
        """The worst of its own state and its figures'."""
        return worst([self.own_state, *(each.state for each in self.figures if each.state is not None)])


def set_baseline(store: Store, name: str, results: Path, why: str, by: str) -> BaselineFact:
    """Name a suite run as the point of reference, in place of an earlier one of that name, which stays."""
    session = read_session(results)
    bare = [run.model_copy(update={"traces": {}}) for run in session.runs]
    fact = BaselineFact(
        name=name, created=now(), by=by, why=why, session=session.model_copy(update={"runs": bare})
    )
    store.add(fact)
    return fact


def diff_baseline(store: Store, name: str, results: Path) -> list[CaseDifference]:
    """Hold a suite run against a baseline, case by case: those of the baseline, then those that are new.

    Raises ConfigError where there is no such baseline, or no suite run.
    """
    before, after = store.baseline(name).session, read_session(results)
    cases = dict.fromkeys(run.case for run in (*before.runs, *after.runs))
    return [_difference(case, before, after) for case in cases]


def _difference(case: str, before: SessionFact, after: SessionFact) -> CaseDifference:
    left, right = _measured(before, case), _measured(after, case)
    if not left:
        return CaseDifference(case, "MISSING", "the baseline has no run of it that was measured")
    if not right:
        return CaseDifference(case, "MISSING", "no run of it was measured")
    different = "; ".join(_incomparable([*left, *right], before, after))
    if different:
        return CaseDifference(case, "INCOMPARABLE", different)
    on_gpu = _on_gpu(after, right[0])
    figures = tuple(
        compare_figure(metric, _values(left, metric), _values(right, metric), on_gpu=on_gpu)
        for metric in _METRICS
        if _values(left, metric) and _values(right, metric)
    )
    lacking = [metric for metric in _METRICS if bool(_values(left, metric)) != bool(_values(right, metric))]
    if lacking:
        return CaseDifference(case, "MISSING", f"one side has no {' and no '.join(lacking)}", figures)
    if not figures:
        return CaseDifference(case, "MISSING", f"neither side has {' or '.join(_METRICS)}")
    return CaseDifference(case, "PASS", "", figures)


def _measured(session: SessionFact, case: str) -> list[RunFact]:
    return [run for run in session.runs if run.case == case and run.state not in _UNUSABLE]


def _values(runs: Sequence[RunFact], metric: str) -> list[float]:
    return [run.values[metric] for run in runs if metric in run.values]


def _incomparable(runs: Sequence[RunFact], before: SessionFact, after: SessionFact) -> Iterator[str]:
    """Why runs of a case cannot be compared: what differs in their strict environment, another recipe."""
    environments = {run.environment for run in runs}
    if len(environments) > 1:
        facts = [{**before.environments, **after.environments}.get(each, {}) for each in environments]
        keys = sorted(key for key in set().union(*facts) if len({str(each.get(key)) for each in facts}) > 1)
        yield f"another strict environment ({', '.join(keys) or 'of which one was not recorded'})"
    if len({run.version for run in runs}) > 1:
        yield "another recipe"


def _on_gpu(session: SessionFact, run: RunFact) -> bool:
    """Whether a run was one on GPUs, as far as its environment says."""
    return session.environments.get(run.environment, {}).get("cuda") is not None
