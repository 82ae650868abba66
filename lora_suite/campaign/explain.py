# SPDX-License-Identifier: Apache-2.0
"""`lora-suite explain`: find the runs that are meant, and say why their speed differs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from check_metrics import MetricsError, load_metrics
from lora_suite.campaign.conclude import VERDICT
from lora_suite.config.errors import ConfigError
from lora_suite.judge.evidence import Evidence, NoEvidence, read_evidence
from lora_suite.judge.explain import Explanation, Side, explain
from lora_suite.judge.explain.steps import NothingTimed
from lora_suite.judge.verdict import RunVerdict, SuiteVerdict
from lora_suite.launch.record import RunDir, RunRecord
from lora_suite.launch.traces import Profile, read_trace
from lora_suite.plan.select import parse_selection

_UNUSABLE = frozenset({"ERROR", "MISSING"})
# How torch's own handlers name their files.
_TRACES = "*.pt.trace.json*"


def explain_paths(
    left: Path,
    right: Path | None,
    select: str | None = None,
    left_trace: Path | None = None,
    right_trace: Path | None = None,
) -> Explanation:
    """Explain the difference between what two paths hold, or between the arms of a pair of one suite run.

    left, right: run folders, or folders of suite runs, of which `select` picks a case by its name (in the
    words of -k) whose repeats are taken together. Without `right`, `select` picks a pair of the suite run.
    left_trace, right_trace: traces of torch's profiler; without them those that lie in the run folders.
    Raises ConfigError for what is not there or not comparable.
    """
    if right is None:
        sides = _arms(left, select, (left_trace, right_trace))
    else:
        sides = _side(left, select, left_trace), _side(right, select, right_trace)
    try:
        return explain(*sides)
    except NothingTimed as error:
        raise ConfigError(f"nothing to compare: {error}") from error


def _side(path: Path, select: str | None, trace: Path | None) -> Side:
    """One side from its own folder."""
    if (path / VERDICT).is_file():
        return _of_case(path, select, trace)
    if not RunDir(path).metrics.is_file():
        raise ConfigError(
            f"{path}: neither a run (it has no metrics.json) nor a run of a suite (it has no {VERDICT})"
        )
    evidence = _read(path)
    return Side(evidence.record.case, (path,), (evidence,), _profile([path], trace))


def _read(path: Path) -> Evidence:
    """A run's metrics and record; another trainer's run has no record, and is then known by its folder."""
    try:
        if RunDir(path).record.is_file():
            return read_evidence(path)
        nameless = RunRecord(run_id="", case=path.name, started="", recipe={}, recipe_hash="")
        return Evidence(load_metrics(RunDir(path).metrics), nameless)
    except (NoEvidence, MetricsError) as error:
        raise ConfigError(f"{path}: {error}") from error


# -- a run of a suite ---------------------------------------------------------------------------------------


def _verdict(path: Path) -> SuiteVerdict:
    file = path / VERDICT
    try:
        return SuiteVerdict.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name the folder of one run of a suite") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a verdict that this release wrote") from error


def _of_case(path: Path, select: str | None, trace: Path | None) -> Side:
    """All measured repeats of the one case that is selected."""
    verdict = _verdict(path)
    matches = parse_selection(select) if select is not None else lambda names: True
    stems = list(dict.fromkeys(run.case for run in verdict.runs))
    chosen = [stem for stem in stems if matches([stem])]
    # A name that is part of another can only be meant by itself.
    chosen = [select] if select in chosen else chosen
    if len(chosen) != 1:
        said = f"-k {select!r} matches {_list(chosen) or 'none'}" if select is not None else "several cases"
        raise ConfigError(f"{path}: {said}; choose one of {_list(stems)} with -k")
    return _repeats(path, verdict, chosen[0], chosen[0], trace)


def _arms(path: Path, select: str | None, traces: tuple[Path | None, Path | None]) -> tuple[Side, Side]:
    """Both arms of the one pair that is selected."""
    verdict = _verdict(path)
    matches = parse_selection(select) if select is not None else lambda names: True
    chosen = [pair for pair in verdict.pairs if matches([pair.name])]
    chosen = [pair for pair in chosen if pair.name == select] or chosen
    names = _list([pair.name for pair in verdict.pairs])
    if len(chosen) != 1:
        raise ConfigError(f"{path}: choose one pair with -k (there are: {names or 'none'}), or name two runs")
    (pair,) = chosen
    if len(pair.arms) != 2:
        raise ConfigError(f"{path}: pair {pair.name} has {len(pair.arms)} arms; name two runs of it")
    left, right = (
        _repeats(path, verdict, case, arm, trace)
        for (arm, case), trace in zip(pair.arms.items(), traces, strict=True)
    )
    return left, right


def _repeats(path: Path, verdict: SuiteVerdict, case: str, name: str, trace: Path | None) -> Side:
    """The repeats of a case that were measured; a run that only failed a check was."""
    runs = [run for run in verdict.runs if run.case == case and run.own_state not in _UNUSABLE]
    if not runs:
        raise ConfigError(f"{path}: no run of {case} was measured")
    folders = [_folder(path, verdict, run) for run in runs]
    evidence = tuple(_read(folder) for folder in folders)
    return Side(name, tuple(folders), evidence, _profile(_from_the_middle(runs, folders), trace))


def _folder(path: Path, verdict: SuiteVerdict, run: RunVerdict) -> Path:
    """A run's folder, also where the suite's has been moved."""
    directory = Path(run.directory)
    if directory.is_relative_to(verdict.directory):
        return path / directory.relative_to(verdict.directory)
    return directory


def _from_the_middle(runs: Sequence[RunVerdict], folders: Sequence[Path]) -> list[Path]:
    """Folders of the runs, that with the median step time first."""
    times = [run.summary.get("median_step_time", 0.0) for run in runs]
    middle = statistics.median_low(times)
    ranked = sorted(zip(times, folders, strict=True), key=lambda each: (abs(each[0] - middle), each[1]))
    return [folder for _, folder in ranked]


# -- profiles -----------------------------------------------------------------------------------------------


def _profile(folders: Sequence[Path], trace: Path | None) -> Profile | None:
    """What was profiled: the trace that is named, or else the first folder's that has any."""
    if trace is not None:
        return read_trace(trace)
    for folder in folders:
        if RunDir(folder).kernels.is_file():
            return Profile.read(RunDir(folder).kernels)
        # Of several ranks the first.
        for found in sorted(folder.rglob(_TRACES)):
            return read_trace(found)
    return None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
