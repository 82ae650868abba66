# SPDX-License-Identifier: Apache-2.0
"""Runs a command of another trainer once, and brings what it left into the shape of a run of ours.

The command, its folder and its environment are theirs. What it is declared to create must not be there
before, and is moved into the run directory after, so that no run can be taken for another: neither an old
result for a new one, nor "already done" for a run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from check_metrics import MetricsError, load_metrics
from lora_suite.config import recipe_hash
from lora_suite.config.errors import ConfigError
from lora_suite.launch.code import commit_of
from lora_suite.launch.ending import by_signal, crash, last_lines, read_tail
from lora_suite.launch.importers import Imported, import_metrics
from lora_suite.launch.processes import undisturbed
from lora_suite.launch.record import (
    Ended,
    Environment,
    Invariant,
    RunDir,
    RunRecord,
    file_sha256,
    write_json_atomically,
)
from lora_suite.launch.supervise import Outcome, Poll, stopped, supervise
from lora_suite.plan.metric_names import LOSS, VALID_TOKENS
from lora_suite.plan.model import ExternalCase, Plan

OUTPUTS = "outputs"
RUN_DIR = "LORA_SUITE_RUN_DIR"
"""Where a hook in the trainer's loop may leave what it measured."""

WEAK = "tokens:"
"""How a fingerprint begins that counts the supervised tokens of a batch and knows nothing else of it."""


class _HookFile(BaseModel):
    """lora_invariants.json, as `lora_suite.hooks` writes it."""

    schema_version: int
    invariants: list[Invariant]


Metrics = Mapping[str, Mapping[str, float | None]]


def refuse_leftovers(plan: Plan) -> None:
    """Raise ConfigError, naming them, if outputs of an external case are there already."""
    there = {
        str(path): case.stem
        for case in plan.cases.values()
        if isinstance(case, ExternalCase)
        for path in leftovers(case)
    }
    if there:
        listed = "\n".join(f"  {path} (case {stem})" for path, stem in there.items())
        raise ConfigError(
            f"{plan.path}: outputs of an earlier run are there and could be taken for new ones; "
            f"move these away first:\n{listed}"
        )


def leftovers(case: ExternalCase) -> list[Path]:
    """The declared outputs that are there, broken symlinks included."""
    return [path for output in case.outputs if os.path.lexists(path := case.cwd / output)]


def run_external(
    case: ExternalCase, run_dir: Path, run_id: str, poll: Poll, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run the command of `case` once; metrics.json, run.json, run.log and ``outputs/`` go to `run_dir`.

    variables: of the environment, over those that are set.
    A run that was not stopped is `done` if it left metrics that reach the last step, whatever its status: the
    judge then asks whether the status fits. It is `failed` if it left no new outputs, even with status 0.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    there = leftovers(case)
    if there:
        message = f"outputs are there before the run: {', '.join(map(str, there))}"
        ended = Ended(how="failed", status=2, message=message)
        _record(case, run_dir, run_id, started, ended, None)
        return ended
    try:
        outcome = supervise(
            [*case.command, *case.overrides],
            cwd=case.cwd,
            environment={**os.environ, **(variables or {}), RUN_DIR: str(run_dir.resolve())},
            run_dir=run_dir,
            run_id=run_id,
            minutes=case.minutes,
            poll=poll,
        )
    except OSError as error:
        ended = Ended(how="failed", status=127, message=f"cannot start {case.command[0]}: {error.strerror}")
        _record(case, run_dir, run_id, started, ended, None)
        return ended
    imported, problem = None, ""
    with undisturbed():
        try:
            _collect(case, run_dir)
            imported = read_metrics(case, run_dir)
        except ConfigError as error:
            problem = str(error)
        ended = outcome.told(_classify(case, run_dir, outcome, imported, problem))
        _record(case, run_dir, run_id, started, ended, imported)
    return ended


def read_metrics(case: ExternalCase, run_dir: Path) -> Imported:
    """Read the metrics that a run left, by the case's dialect; raises ConfigError."""
    folder = (run_dir / OUTPUTS).resolve()
    path = folder / case.metrics
    if not path.exists():
        raise ConfigError(f"no metrics: it left no {case.metrics}")
    if not path.resolve().is_relative_to(folder):
        raise ConfigError(f"{case.metrics} leads out of the outputs by a symlink, to {path.resolve()}")
    dialect = case.dialect
    if dialect.format == "common":
        imported = Imported(_common(path), (), (1,))
    else:
        imported = import_metrics(path, dialect.format, step_key=dialect.step_key)
    return Imported(dialect.translated(imported.metrics), imported.warnings, imported.segments or (1,))


def _common(path: Path) -> dict[str, dict[str, float | None]]:
    """A metrics.json of the common shape; what is not finite becomes null."""
    try:
        found = load_metrics(path)
    except MetricsError as error:
        raise ConfigError(str(error)) from error
    return {
        name: {
            str(step): None if step in bad else value
            for step, value in zip(series.steps, series.values, strict=True)
        }
        for name, series in found.items()
        for bad in [set(series.nonfinite_steps())]
    }


def _collect(case: ExternalCase, run_dir: Path) -> None:
    """Move every declared output that is there into the run directory.

    Raises ConfigError if none is there, and for one that has become a way out of the folder.
    """
    there = leftovers(case)
    if not there:
        names = ", ".join(map(str, case.outputs))
        raise ConfigError(f"it left no new outputs ({names}); did it find its work already done?")
    escaped = [path for path in there if not path.resolve().is_relative_to(case.cwd)]
    if escaped:
        raise ConfigError(f"{escaped[0]} leads out of {case.cwd} by a symlink, to {escaped[0].resolve()}")
    for path in there:
        target = run_dir / OUTPUTS / path.relative_to(case.cwd)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)


def _classify(
    case: ExternalCase, run_dir: Path, outcome: Outcome, imported: Imported | None, problem: str
) -> Ended:
    """Name how the run ended."""
    reached = _last_step(imported.metrics) if imported else 0
    ended = stopped(outcome, run_dir, case.minutes, f"after step {reached} of {case.steps}")
    if ended is not None:
        return ended
    text = read_tail(RunDir(run_dir).log)
    if imported is not None and (outcome.status == 0 or reached >= case.steps):
        return Ended(how="done", status=outcome.status, last_lines=last_lines(text))
    if outcome.status == 0:
        return Ended(
            how="failed", status=0, message=f"ended with status 0, but {problem}", last_lines=last_lines(text)
        )
    return by_signal(crash(run_dir, text, outcome.status), "the command")


def _record(
    case: ExternalCase, run_dir: Path, run_id: str, started: str, ended: Ended, imported: Imported | None
) -> None:
    """Write metrics.json, if there are any, and run.json."""
    files = RunDir(run_dir)
    metrics: Metrics = imported.metrics if imported else {}
    if imported is not None:
        write_json_atomically(files.metrics, metrics)
    tokens = metrics.get(VALID_TOKENS, {})
    bad = {
        name: [int(step) for step, value in series.items() if value is None]
        for name, series in metrics.items()
    }
    RunRecord(
        run_id=run_id,
        case=case.stem,
        started=started,
        recipe=case.tree,
        recipe_hash=recipe_hash(case.tree),
        steps_done=_last_step(metrics),
        metrics_sha256=file_sha256(files.metrics) if imported else None,
        segments=list(imported.segments) if imported else [1],
        batches={step: f"{WEAK}{value:.15g}" for step, value in tokens.items() if value is not None},
        dialect=case.dialect.name,
        invariants=_invariants(files.invariants),
        nonfinite={name: steps for name, steps in bad.items() if steps},
        environment=_environment(case),
        ended=ended,
    ).write(files.record)


def _environment(case: ExternalCase) -> Environment | None:
    """The commit of the command's folder, which is all that is known here of what it ran on."""
    commit = commit_of(case.cwd)
    return Environment(strict={}, soft={"code": commit}) if commit is not None else None


def _invariants(path: Path) -> list[Invariant]:
    """LoRA invariants that a hook in the trainer's loop recorded, none without one or from a damaged file."""
    try:
        return _HookFile.model_validate_json(path.read_text(encoding="utf-8")).invariants
    except (OSError, ValueError):
        return []


def _last_step(metrics: Metrics) -> int:
    """The highest step that has a loss, 0 without any."""
    return max((int(step) for step in metrics.get(LOSS, {})), default=0)
