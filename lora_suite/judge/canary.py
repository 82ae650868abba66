# SPDX-License-Identifier: Apache-2.0
"""What a canary's pair says of the detector: its answer is known, so it is turned into PASS or INCONCLUSIVE.

A canary never fails a suite. One that gives the wrong answer makes the suite INCONCLUSIVE, since the verdicts
beside it come from the same detector on the same machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_suite.judge.verdict import PairCheckVerdict, PairVerdict, RunVerdict, worst
from lora_suite.launch.record import RunDir, write_json_atomically
from lora_suite.plan.metric_names import STEP_TIME
from lora_suite.plan.model import Canary

_BROKEN = frozenset({"MISSING", "ERROR", "INCOMPARABLE"})


def answered(canary: Canary, verdict: PairVerdict) -> PairVerdict:
    """The verdict of a canary's pair, with what its checks must say for PASS.

    Runs that are lacking, or cannot be compared, stay what they are.
    """
    checks = [_answered(canary, check) for check in verdict.checks]
    note = {
        "same": "canary: both arms are the same case, so no difference may be seen",
        "slower": f"canary: the second arm was slowed down {canary.factor:g} times while it trained",
        "injected": f"canary: the second arm's recorded step times are multiplied by {canary.factor:g}",
    }[canary.kind]
    return verdict.model_copy(
        update={
            "checks": checks,
            "state": worst([verdict.own_state, *(check.state for check in checks)]),
            "notes": [note, *verdict.notes],
        }
    )


def _answered(canary: Canary, check: PairCheckVerdict) -> PairCheckVerdict:
    if check.state in _BROKEN:
        return check
    seen = f"{check.value}: " if check.value else ""
    if canary.kind == "same":
        if check.state == "FAIL":
            message = (
                f"{seen}the detector sees a difference of a case from itself; tonight's times tell nothing"
            )
            return check.model_copy(update={"state": "INCONCLUSIVE", "message": message})
        unsure = f"{seen}no difference seen, nor ruled out" if check.state == "INCONCLUSIVE" else ""
        return check.model_copy(update={"state": "PASS", "message": unsure})
    if check.state == "FAIL":
        return check.model_copy(update={"state": "PASS", "message": f"{seen}seen, as it must be"})
    reason = f": {check.message}" if check.effect is None else ""
    message = f"{seen}the detector is blind: it does not see a planted slowdown of {canary.factor:g}{reason}"
    return check.model_copy(update={"state": "INCONCLUSIVE", "message": message})


def injected(runs: Sequence[RunVerdict], factor: float, folder: Path) -> list[RunVerdict]:
    """Copies of runs under `folder`, with step times multiplied; runs that left none stay as they are."""
    return [_injected(run, factor, folder / str(number)) for number, run in enumerate(runs)]


def _injected(run: RunVerdict, factor: float, folder: Path) -> RunVerdict:
    files, copy = RunDir(Path(run.directory)), RunDir(folder)
    if run.own_state != "PASS":
        return run
    metrics: dict[str, Mapping[str, float | None]] = json.loads(files.metrics.read_text(encoding="utf-8"))
    times = metrics.get(STEP_TIME, {})
    metrics[STEP_TIME] = {step: None if value is None else value * factor for step, value in times.items()}
    folder.mkdir(parents=True)
    shutil.copy(files.record, copy.record)
    write_json_atomically(copy.metrics, metrics)
    return run.model_copy(update={"directory": str(folder)})
