# SPDX-License-Identifier: Apache-2.0
"""The folder of a suite run, read as facts: `verdict.json`, and each run's `run.json` and `metrics.json`.

The verdict says what was planned and measured, the record what it ran on and with which recipe. Runs that
left no record stand in the history with their state alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from check_metrics import ExpressionError, parse
from lora_suite.config.errors import ConfigError
from lora_suite.config.tree import recipe_hash
from lora_suite.history.facts import (
    UNKNOWN_ENVIRONMENT,
    PairFact,
    RunFact,
    SessionFact,
    Trace,
    content_id,
    utc,
)
from lora_suite.history.metrics import SUMMARIES, phase_metric
from lora_suite.judge.evidence import Evidence, NoEvidence, read_evidence
from lora_suite.judge.verdict import RunVerdict, SuiteVerdict
from lora_suite.plan.comparability import FAULTS, NO_FAULTS
from lora_suite.plan.metric_names import PHASES

VERDICT = "verdict.json"
_HASH_DIGITS = 8
# What says nothing of the training that was run: where it logs, how it is called.
_NOT_THE_TRAINING = ("logger", "checkpointing.checkpoint_dir", FAULTS)


def read_session(folder: Path) -> SessionFact:
    """Read the folder of one suite run; raises ConfigError where its verdict is not there or damaged."""
    verdict = read_verdict(folder)
    environments: dict[str, dict[str, Any]] = {}
    # Repeat 0 only warms the machine.
    runs = [
        _run_fact(run, run_folder(folder, run), verdict, environments)
        for run in verdict.runs
        if run.repeat > 0
    ]
    return SessionFact(
        suite=verdict.suite,
        name=Path(verdict.directory).name,
        started=verdict.started,
        seconds=verdict.seconds,
        exit_code=verdict.exit_code,
        folder=str(folder),
        runs=runs,
        pairs=list(_pair_facts(verdict, runs)),
        environments=environments,
    )


def read_verdict(folder: Path) -> SuiteVerdict:
    """Read `verdict.json` of a suite run; raises ConfigError."""
    path = folder / VERDICT
    try:
        return SuiteVerdict.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the folder of one suite run") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no verdict of a suite run: {_first(error)}") from error


def training_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved recipe, less what says nothing of the training.

    A planted fault makes it another recipe: such a run is no night like the others.
    """
    tree = _without(recipe, _NOT_THE_TRAINING)
    debug = recipe.get("debug")
    planted = debug.get("faults") if isinstance(debug, Mapping) else None
    if isinstance(planted, Mapping):
        active = {name: value for name, value in planted.items() if value != NO_FAULTS.get(name)}
        tree |= {FAULTS: active} if active else {}
    return tree


def environment_id(strict: Mapping[str, Any]) -> str:
    """Hash of the strict facts of an environment, as a run's verdict has it."""
    return recipe_hash(strict)[:_HASH_DIGITS] if strict else UNKNOWN_ENVIRONMENT


def run_folder(folder: Path, run: RunVerdict) -> Path:
    """Where a run lies within the folder of its suite run, wherever that was moved to."""
    return folder / run.case / str(run.repeat)


def _first(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return str(error)
    found = error.errors()[0]
    return f"{'.'.join(str(part) for part in found['loc']) or 'document'}: {found['msg']}"


def _without(tree: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The tree less some dotted keys and all below them."""
    kept = {}
    for key, value in tree.items():
        if key in keys:
            continue
        below = [name.removeprefix(f"{key}.") for name in keys if name.startswith(f"{key}.")]
        kept[key] = _without(value, below) if below and isinstance(value, Mapping) else value
    return kept


def _run_fact(
    run: RunVerdict, run_dir: Path, verdict: SuiteVerdict, environments: dict[str, dict[str, Any]]
) -> RunFact:
    evidence = _evidence(run_dir, run)
    environment = UNKNOWN_ENVIRONMENT
    if evidence is not None and evidence.record.environment is not None:
        environment = environment_id(evidence.record.environment.strict)
        environments[environment] = evidence.record.environment.strict
    return RunFact(
        case=run.case,
        repeat=run.repeat,
        pair=run.pair,
        arm=run.arm,
        run_id=run.run_id,
        started=_started(evidence, verdict),
        version=recipe_hash(training_of(evidence.record.recipe)) if evidence is not None else "",
        environment=environment,
        code=run.code,
        state=run.state,
        seconds=run.seconds,
        values=_values(run),
        health=run.health,
        traces=dict(_traces(evidence, run)) if evidence is not None else {},
    )


def _evidence(run_dir: Path, run: RunVerdict) -> Evidence | None:
    """What the run left behind, None where nothing is readable or it is another run's."""
    try:
        found = read_evidence(run_dir)
    except NoEvidence:
        return None
    return found if found.record.run_id == run.run_id else None


def _started(evidence: Evidence | None, verdict: SuiteVerdict) -> str:
    try:
        return utc(evidence.record.started if evidence is not None else verdict.started)
    except ValueError:
        return utc(verdict.started)


def _values(run: RunVerdict) -> dict[str, float]:
    """A figure a metric, positive ones alone: they are compared as ratios."""
    named = {SUMMARIES[name]: value for name, value in run.summary.items() if name in SUMMARIES}
    phases = {phase_metric(name): value for name, value in run.phases.items() if name in PHASES}
    return {name: value for name, value in {**phases, **named}.items() if value > 0}


def _traces(evidence: Evidence, run: RunVerdict) -> Iterator[tuple[str, Trace]]:
    for name in _values(run):
        series = evidence.metrics.get(name)
        if series is not None and series.steps and all(map(math.isfinite, series.values)):
            yield name, Trace(steps=list(series.steps), values=list(series.values))


def _pair_facts(verdict: SuiteVerdict, runs: Sequence[RunFact]) -> Iterator[PairFact]:
    for pair in verdict.pairs:
        arms = [run for run in runs if run.case in pair.arms.values() and run.version]
        for check in pair.checks:
            if check.effect is None or not check.effect.ratios or pair.own_state != "PASS":
                continue
            yield PairFact(
                pair=pair.name,
                expression=series_name(check.expression),
                operator=check.operator,
                version=content_id(sorted({(run.case, run.version) for run in arms})),
                environment=_common_environment(arms),
                state=check.state,
                estimate=check.effect.estimate,
                low=check.effect.low,
                high=check.effect.high,
                ratios=check.effect.ratios,
            )


def series_name(expression: str) -> str:
    """The ratio that a pair check is about, without its limit: a limit may change, the series goes on."""
    try:
        form = parse(expression).pair
    except ExpressionError:
        return expression
    if form is None:
        return expression
    arms = ", ".join(f'{arm}["{metric}"]' for arm, metric in (form.left, form.right))
    whole = form.range_start is None and form.range_end == 0
    window = "" if whole else f", {form.range_start}, {form.range_end}"
    return f"{form.function}({arms}{window})"


def _common_environment(runs: Sequence[RunFact]) -> str:
    known = sorted({run.environment for run in runs} - {UNKNOWN_ENVIRONMENT})
    return known[0] if len(known) == 1 else content_id(known) if known else UNKNOWN_ENVIRONMENT
