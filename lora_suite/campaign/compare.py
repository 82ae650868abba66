# SPDX-License-Identifier: Apache-2.0
"""`lora-suite compare`: two runs, or two runs of a suite, case by case and pair by pair.

Runs are compared where recipe and strict environment are the same; else each difference is named and the case
is INCOMPARABLE, unless somebody asks to compare it all the same. Planted faults are allowed, and told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_suite.config import differences, flatten
from lora_suite.config.errors import ConfigError
from lora_suite.history.artefacts import VERDICT, read_verdict, run_folder, training_of
from lora_suite.history.comparison import CaseComparison, Comparison, LossComparison, PairComparison
from lora_suite.history.figures import Figure, compare_figure
from lora_suite.history.metrics import PEAK_MEMORY
from lora_suite.judge.attribution import SMALLEST_CHANGE, attribute
from lora_suite.judge.curves import CurveVerdict, LevelVerdict, compare_curves, compare_levels
from lora_suite.judge.evidence import Evidence, NoEvidence, read_evidence
from lora_suite.judge.run import summary
from lora_suite.judge.statistics import moved
from lora_suite.judge.verdict import PairVerdict, PhaseDelta, RunVerdict, State, SuiteVerdict
from lora_suite.plan.comparability import FAULTS
from lora_suite.plan.metric_names import LOSS, STEP_TIME, VALID_TOKENS

FULL, LORA = "full", "lora"
_OTHER = "other"
_UNUSABLE = frozenset({"ERROR", "MISSING"})
_FIGURES = {STEP_TIME: "median_step_time", PEAK_MEMORY: "peak_memory_gib"}


@dataclass(frozen=True)
class _Side:
    """What a path holds: measured runs by case (also those of which none was measured), and its verdict."""

    path: Path
    cases: dict[str, list[Evidence]]
    verdict: SuiteVerdict | None = None
    runs: dict[tuple[str, int], Evidence] = field(default_factory=dict)


def compare_paths(left: Path, right: Path, *, lenient: bool = False) -> Comparison:
    """Compare two run folders, two folders of suite runs, or one of each; raises ConfigError."""
    ours, theirs = _side(left), _side(right)
    if ours.verdict is None and theirs.verdict is None:
        (a,), (b,) = ours.cases, theirs.cases
        name = a if a == b else f"{a} and {b}"
        cases = [_compare(name, ours.cases[a], theirs.cases[b], lenient)]
    else:
        names = _names(ours, theirs)
        cases = [_compare(name, ours.cases.get(name), theirs.cases.get(name), lenient) for name in names]
    comparable = {each.case for each in cases if each.own_state == "PASS"}
    return Comparison(
        left=str(left),
        right=str(right),
        lenient=lenient,
        cases=cases,
        pairs=list(_pairs(ours, theirs, comparable)),
    )


def _names(left: _Side, right: _Side) -> list[str]:
    """Cases of both; where one side is a single run, its case alone."""
    single = [side for side in (left, right) if side.verdict is None]
    return list(dict.fromkeys([*single[0].cases] if single else [*left.cases, *right.cases]))


def _side(path: Path) -> _Side:
    if (path / VERDICT).is_file():
        verdict = read_verdict(path)
        runs = {
            (run.case, run.repeat): _read(run_folder(path, run))
            for run in verdict.runs
            if run.state not in _UNUSABLE and run.repeat > 0
        }
        cases: dict[str, list[Evidence]] = {run.case: [] for run in verdict.runs}
        for (case, _), evidence in runs.items():
            cases[case].append(evidence)
        return _Side(path, cases, verdict, runs)
    evidence = _read(path)
    return _Side(path, {evidence.record.case: [evidence]})


def _read(path: Path) -> Evidence:
    try:
        return read_evidence(path)
    except NoEvidence as error:
        what = str(error) if path.is_dir() else "no such folder"
        raise ConfigError(f"{path}: {what}; name a run folder, or a suite run's ({VERDICT})") from error


# -- cases --------------------------------------------------------------------------------------------------


def _compare(
    name: str, left: list[Evidence] | None, right: list[Evidence] | None, lenient: bool
) -> CaseComparison:
    if not left or not right:
        sides = " and ".join(side for side, runs in (("left", left), ("right", right)) if not runs)
        return CaseComparison(case=name, own_state="MISSING", message=f"not measured on the {sides}")
    environment = list(_environment_differences(left, right))
    recipe, faults = _recipe_differences(left, right)
    differing = [*environment, *recipe, *faults]
    if (environment or recipe) and not lenient:
        what = " and ".join(
            word for word, found in (("strict environment", environment), ("recipe", recipe)) if found
        )
        return CaseComparison(
            case=name,
            own_state="INCOMPARABLE",
            message=f"another {what}; --lenient compares all the same",
            differing=differing,
        )
    figures = list(_figures(left, right))
    return CaseComparison(
        case=name,
        own_state="PASS" if figures else "MISSING",
        message="" if figures else f"neither {' nor '.join(_FIGURES)} on both sides",
        differing=differing,
        figures=figures,
        loss=_loss(left, right),
    )


def _environment_differences(left: Sequence[Evidence], right: Sequence[Evidence]) -> Iterator[str]:
    """The strict facts in which runs differ; where only one side recorded any, that."""
    facts = [
        flatten(run.record.environment.strict) if run.record.environment else {} for run in (*left, *right)
    ]
    if any(facts) and not all(facts):
        yield "environment: of some runs it was not recorded"
        return
    for key in dict.fromkeys(key for each in facts for key in each):
        values = list(dict.fromkeys(str(each.get(key)) for each in facts))
        if len(values) > 1:
            yield f"environment {key}: {' and '.join(values)}"


def _recipe_differences(left: Sequence[Evidence], right: Sequence[Evidence]) -> tuple[list[str], list[str]]:
    """Settings in which runs differ; and planted faults, which are there to be found, so are only told."""
    trees = [training_of(run.record.recipe) for run in (*left, *right)]
    recipe: dict[str, None] = {}
    faults: dict[str, None] = {}
    for tree in trees[1:]:
        for key, before, after in differences(trees[0], tree):
            if key.startswith(FAULTS):
                faults[f"planted fault {key}: {before!r} and {after!r}"] = None
            else:
                recipe[f"recipe {key}: {before!r} and {after!r}"] = None
    return list(recipe), list(faults)


def _figures(left: Sequence[Evidence], right: Sequence[Evidence]) -> Iterator[Figure]:
    environment = right[0].record.environment
    on_gpu = environment is not None and environment.strict.get("cuda") is not None
    for metric, name in _FIGURES.items():
        sides = [
            [figures[name] for run in runs if (figures := summary(run)).get(name, 0.0) > 0]
            for runs in (left, right)
        ]
        if all(sides):
            yield compare_figure(metric, *sides, on_gpu=on_gpu)


def _loss(left: Sequence[Evidence], right: Sequence[Evidence]) -> LossComparison | None:
    """Step by step where all runs saw the same batches, by the level that they end on where not."""
    ours, theirs = [_curve(run) for run in left], [_curve(run) for run in right]
    if not (all(ours) and all(theirs)):
        return None
    seen = {_batches(run) for run in (*left, *right)}
    if len(seen) > 1 or None in seen:
        level: LevelVerdict = compare_levels(theirs, ours)
        return LossComparison(tier="statistical", state=level.state, message=level.message)
    curves: list[CurveVerdict] = [compare_curves(new, old) for new in theirs for old in ours]
    tiers = ("apart", "drift", "exact")
    found = min(curves, key=lambda curve: (tiers.index(curve.tier), -(curve.largest or 0.0)))
    return LossComparison(tier=found.tier, state=found.state, message=found.message)


def _curve(run: Evidence) -> dict[int, float]:
    series = run.metrics.get(LOSS)
    return dict(zip(series.steps, series.values, strict=True)) if series is not None else {}


def _batches(run: Evidence) -> tuple[Any, ...] | None:
    """What a run says of its batches: fingerprints, or else their supervised tokens; None for nothing."""
    if run.record.batches:
        return tuple(sorted(run.record.batches.items()))
    tokens = run.metrics.get(VALID_TOKENS)
    return (tokens.steps, tokens.values) if tokens is not None and tokens.steps else None


# -- pairs --------------------------------------------------------------------------------------------------


def _pairs(left: _Side, right: _Side, comparable: set[str]) -> Iterator[PairComparison]:
    """Attribution of each pair of a full and a LoRA arm that both suite runs have."""
    if left.verdict is None or right.verdict is None:
        return
    before = {pair.name: pair for pair in left.verdict.pairs}
    for pair in right.verdict.pairs:
        reference = before.get(pair.name)
        if not {FULL, LORA} <= pair.arms.keys():
            continue
        if reference is None or reference.arms != pair.arms:
            message = "the left suite run has no such pair of these cases"
            yield PairComparison(pair=pair.name, state="MISSING", message=message)
        elif not set(pair.arms.values()) <= comparable:
            message = "an arm is not comparable or not measured"
            yield PairComparison(pair=pair.name, state="INCOMPARABLE", message=message)
        else:
            yield _attributed(pair, left, right)


def _attributed(pair: PairVerdict, left: _Side, right: _Side) -> PairComparison:
    reference, tonight = _blocks(pair, left), _blocks(pair, right)
    try:
        found = attribute(
            {arm: [_log_time(right, run) for run in runs] for arm, runs in tonight.items()},
            {arm: [_log_time(left, run) for run in runs] for arm, runs in reference.items()},
            lora=LORA,
            full=FULL,
            source=str(left.path),
        )
    except ValueError as error:
        return PairComparison(pair=pair.name, state="INCONCLUSIVE", message=f"no attribution: {error}")
    slower = any(moved(effect, SMALLEST_CHANGE) == "slower" for effect in found.changes.values())
    state: State = "INCONCLUSIVE" if found.moved == "unclear" else "FAIL" if slower else "PASS"
    arm = {"lora-only": LORA, "full-only": FULL}.get(found.moved)
    if arm is not None:
        found.phases = list(_phases(reference[arm], tonight[arm]))
    return PairComparison(pair=pair.name, state=state, message=found.message, attribution=found)


def _blocks(pair: PairVerdict, side: _Side) -> dict[str, list[RunVerdict]]:
    """The measured runs of each arm, by the blocks of which both were: the k-th of both ran together."""
    runs = [run for run in (side.verdict.runs if side.verdict is not None else []) if run.repeat > 0]
    # A pair that reuses runs has none of its own: those of its arms' cases are meant.
    own = [run for run in runs if run.pair == pair.name] or runs
    arms = {
        arm: sorted(
            (run for run in own if run.case == pair.arms[arm] and (own is runs or run.arm == arm)),
            key=lambda run: run.repeat,
        )
        for arm in (FULL, LORA)
    }
    whole = [
        block
        for block in zip(*arms.values(), strict=False)
        if all((run.case, run.repeat) in side.runs and "median_step_time" in run.summary for run in block)
    ]
    return {arm: [block[place] for block in whole] for place, arm in enumerate(arms)}


def _log_time(side: _Side, run: RunVerdict) -> float:
    return math.log(summary(side.runs[run.case, run.repeat])["median_step_time"])


def _phases(reference: Sequence[RunVerdict], tonight: Sequence[RunVerdict]) -> Iterator[PhaseDelta]:
    """Median of each phase over the runs of an arm on both sides, and what is left of the median step."""
    sides = reference, tonight
    names = dict.fromkeys(phase for runs in sides for run in runs for phase in run.phases)
    if not names:
        return
    rest = [statistics.median(run.summary["median_step_time"] for run in runs) for runs in sides]
    for phase in names:
        # A phase that took no time is left out of a verdict.
        took = [statistics.median(run.phases.get(phase, 0.0) for run in runs) for runs in sides]
        rest = [left - spent for left, spent in zip(rest, took, strict=True)]
        yield PhaseDelta(phase=phase, left=took[0], right=took[1])
    yield PhaseDelta(phase=_OTHER, left=rest[0], right=rest[1])
